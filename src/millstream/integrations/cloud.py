"""Files behind `s3://`, `gs://`, `https://` and whatever else fsspec knows, in place of paths.

`NpySource`, `CsvSource`, `IdxSource` and the sources of Parquet, Arrow, tar, safetensors, token, text and TFRecord
files take such addresses as they take paths. What is read is kept in a bounded cache on disk, answers that break off
or come late are asked for again, and a file that changes while it is read is `FileChanged`.

Example:
    >>> import fsspec, io
    >>> from millstream.integrations import cloud
    >>> cloud.configure("memory://", cache_limit=0)
    >>> stream = io.BytesIO()
    >>> np.save(stream, np.arange(10, dtype=np.float32))
    >>> fsspec.filesystem("memory").pipe_file("/numbers.npy", stream.getvalue())
    >>> ms.NpySource("memory://numbers.npy").read(np.array([3, 1])).tolist()
    [3.0, 1.0]
"""

from millstream.errors import FileChanged as FileChanged
from millstream.files.remote_file import Traffic as Traffic
from millstream.files.remote_file import traffic as traffic
from millstream.files.remote_options import CloudOptions as CloudOptions
from millstream.files.remote_options import configure as configure
from millstream.files.remote_options import options_for as options_for

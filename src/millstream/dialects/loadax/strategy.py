"""How many items a batch has, under the module that loadax keeps it in."""

from millstream.dialects.loadax._loader import FixedBatchStrategy as FixedBatchStrategy

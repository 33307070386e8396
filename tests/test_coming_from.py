"""The tables "Every name" of docs/coming-from: each documented name of an earlier library has one true row."""

import importlib
import inspect
import pathlib
import re
from typing import Any

import pytest

PAGES = pathlib.Path(__file__).parent.parent / "docs" / "coming-from"
TITLE = "## Every name"

# What the libraries document: their texts, and the public names of what they have released. `A: b c` is A, A.b and A.c.
DOCUMENTED = {
    "cyreal": """
        loader sources transforms rl datasets
        DataLoader: init_state next iterate scan_epoch steps_per_epoch
        LoaderState
        Source: init_state next element_spec steps_per_epoch
        ArraySource: element_spec init_state next num_samples
        ArraySampleSource
        DiskSource: element_spec init_state next
        DiskSampleSource
        GymnaxSource: element_spec init_state next set_policy_state
        GymnaxSourceState
        rl.set_loader_policy_state rl.set_source_policy_state
        BatchTransform BatchTransform(element_spec_override=) BatchTransform(pad_last_batch=)
        BufferTransform TimeSeriesBatchTransform MapTransform MapTransform(element_spec_override=)
        HostCallbackTransform HostCallbackTransform(element_spec_override=)
        DevicePutTransform RenameTransform NormalizeImageTransform FlattenTransform transforms.SourceTransform
        MNISTDataset: as_array_dict make_disk_source
        FashionMNISTDataset: as_array_dict make_disk_source
        KMNISTDataset: as_array_dict make_disk_source
        EMNISTDataset: as_array_dict make_disk_source
        CIFAR10Dataset: as_array_dict make_disk_source
        CIFAR100Dataset: as_array_dict make_disk_source
        CelebADataset: as_array_dict make_disk_source attribute_names
        CelebADataset(image_archive_url=) CelebADataset(partition_url=) CelebADataset(attributes_url=)
        DailyMinTemperaturesDataset: as_array_dict make_disk_source
        SunspotsDataset: as_array_dict make_disk_source
        datasets.DatasetProtocol datasets.MNIST_URLS
        datasets.mnist_utils.read_idx_images datasets.mnist_utils.read_idx_labels
        datasets.mnist_utils.ensure_uncompressed_idx datasets.mnist_utils.read_image_header
        datasets.mnist_utils.read_label_header
        datasets.time_utils.load_value_column datasets.time_utils.select_split
        datasets.time_utils.sliding_window_many datasets.time_utils.load_time_series_from_csv
        datasets.time_utils.prepare_time_series_windows datasets.time_utils.prepare_seq_to_seq_windows
        datasets.time_utils.make_sequence_disk_source
        datasets.utils.download_with_progress datasets.utils.resolve_cache_dir datasets.utils.ensure_file
        datasets.utils.ensure_csv datasets.utils.download_archive datasets.utils.ensure_tar_extracted
        datasets.utils.to_host_jax_array
    """,
    "cereal": """
        DataLoader: init_state next_batch scan_epoch
        DataLoader(batch_transform=)
        LoaderState Source dataset_to_jax
        ArraySampleSource DiskSampleSource MNISTDiskSource GymnaxSource
        BatchTransform MapTransform HostCallbackTransform HostCallbackTransform(element_spec_override=)
        NormalizeImageTransform FlattenImageTransform DevicePutTransform
        MNISTDataset: as_array_dict
        CIFAR10Dataset: as_array_dict
    """,
    "loadax": """
        DataLoader: batch_size workers prefetch shard build
        DataloaderBuilder: batch_size workers prefetch shard build
        Dataloader Dataloader(batcher=) NaiveDataloader
        dataloader dataloader.distributed.DistributedDataLoader
        dataloader.distributed.DistributedDataLoaderIterator
        dataloader.distributed.JaxShardingStrategy: get_shard named_sharding distribute_global_batch
        dataloader.naive dataloader.progress dataloader.protocol
        ShardingStrategy NoShardingStrategy
        DistributedShardingStrategy: get_shard_indices needs_sharding distribute_global_batch
        Progress
        strategy.FixedBatchStrategy: add batch clone
        strategy.BatchStrategy
        Batcher: batch
        Batcher(device=)
        Dataset: get is_empty map filter map_batch shuffle split_dataset_by_node
        DatasetIterator DatasetItem dataset
        InMemoryDataset: get
        InMemoryDataset(items=)
        RangeDataset: get
        RangeDataset(start=) RangeDataset(end=) RangeDataset(step=)
        MappedDataset: get
        MappedDataset(map_fn=)
        CombinedDataset: get
        PartialDataset: get split split_dataset
        PartialDataset.split(num_parts=)
        ShuffledDataset: get
        SampledDatasetWithoutReplacement: get
        SampledDatasetWithReplacement: get
        SimpleDataset FilteredDataset MappedBatchDataset SampledDataset ShardedDataset Shardable Shuffleable
        compute_shard_boundaries
        dataset.huggingface.HuggingFaceDataset
        ddp_sharding fsdp_sharding
        sharding.MeshConfig sharding.HybridMeshShape sharding.DataPartitionType sharding.with_sharding_constraint
        sharding.host_to_global_device_array sharding.global_to_host_array sharding.make_ddp_mesh_config
        sharding.make_fsdp_mesh_config sharding.presets
    """,
    "hydrax": """
        DataGroup: batch_size batch_count loader_layouts cache_layouts loader_size cache_size
        Dataloader: batches_per_epoch batches_per_validation interrupted first_batch last_batch deterministic idle_usec
        Dataloader.interrupt Dataloader(depth=) Dataloader(start_at=) Dataloader(end_at=)
        Dataloader(validation=) Dataloader(interleave_groups=) Dataloader(placement_func=) Dataloader(loader_count=)
        Dataloader(cacher_count=) Dataloader(startup_func=) Dataloader(loader_nice=) Dataloader(timeout_sec=)
        Dataloader(deterministic=)
        Batch: is_validation is_training group group_index indices data get_data layouts arrays get_array additional
        Batch.get_additional Batch.uncached Batch.cache
        TrainingBatch: is_validation is_training epoch epoch_batch batch_num seed seeds
        ValidationBatch: is_validation is_training validation_epoch validation_epoch_batch validation_batch_num
        BatchTimeoutError is_worker debug_batch_references ArrayLayout
        tqdm.tbatches tqdm.ProgressMonitor: begin_batch end_batch close
        pandas.RowData: dataframe
        image.Coefs image.set_max_image_pixels image.open_srgb image.write_hwc image.write_chw image.from_srgb_hwc
        image.convert_srgb_to_oklab_frac_hwc image.convert_srgb_to_oklab_frac_chw
        image.convert_oklab_to_srgb_frac_hwc image.convert_oklab_to_srgb_frac_chw
        image.convert_frac_to_balanced_hwc image.convert_frac_to_balanced_chw
        image.convert_balanced_to_frac_hwc image.convert_balanced_to_frac_chw
    """,
    "ciclo": """
        loop train_loop test_loop predict_loop elapse LoopState
        LoopElement: keys
        LoopCallbackBase callback inject on_train_begin on_train_batch_begin on_train_step on_train_batch_end
        on_epoch_end on_train_end on_reset_step on_test_begin on_test_batch_begin on_test_step on_test_batch_end
        on_test_end every after always never piecewise at
        Period: create
        Elapsed: steps samples time date date_start create update update_time to_dict
        logs
        Logs: add_metric add_metrics add_stateful_metric add_stateful_metrics add_loss add_losses add_output
        Logs.add_outputs Logs.add_entry Logs.add_entries Logs.updates Logs.merge Logs.entry_value Logs.entry_path
        Logs.entry_collection
        history
        History: collect commit
        checkpoint early_stopping inner_loop keras_bar tqdm_bar wandb_logger noop
        managed: train_step step ManagedStep ManagedTrainStep
        managed.ManagedState: create with_strategy replace apply_gradients
        get_strategy register_strategy
        Strategy: lift_batch_size from_host to_host lift_batch lift_key handle_metric handle_grads handle_batch_stats
        Strategy.lower_tileable Strategy.lower_sharded Strategy.lower_averageable Strategy.lower_replicated
        Eager JIT DataParallel create_flax_state
        FlaxState: train_step test_step predict_step reset_step apply module
        callbacks
        schedules: Schedule
        logging loops states strategies timetracking types utils
    """,
}


def documented(library):
    names = []
    for line in DOCUMENTED[library].splitlines():
        *before, last = line.split(": ")
        if before:
            *alone, owner = before[0].split()
            names += [*alone, owner, *(f"{owner}.{name}" for name in last.split())]
        else:
            names += last.split()
    return [f"{library}.{name}" for name in names]


def rows(page):
    """The rows of the table: name, what is said of it, and the note."""
    section = page.read_text().partition(f"{TITLE}\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^\|(.*)\|$", section, re.MULTILINE)
    return [tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line)) for line in lines]


def pages():
    return [page for page in sorted(PAGES.glob("*.md")) if TITLE in page.read_text()]


def is_here(name):
    """Whether `library.name`, `library.Class.method` or `library.Class(argument=)` is in the dialect."""
    name, _, argument = name.partition("(")
    library, *parts = name.split(".")
    path = f"millstream.dialects.{library}"
    value: Any = importlib.import_module(path)
    for part in parts:
        path += f".{part}"
        if not hasattr(value, part):
            try:
                value = importlib.import_module(path)
            except ModuleNotFoundError:
                return False
        else:
            value = getattr(value, part)
    if not argument:
        return True
    called = [value, value.__init__] if inspect.isclass(value) else [value]
    return any(argument.removesuffix("=)") in inspect.signature(function).parameters for function in called)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_every_row_says_what_is_so(page):
    (titles, line, *found) = rows(page)
    assert titles == ("name", "here", "note") and {*line} == {"---"}
    for name, here, note in found:
        assert re.fullmatch(r"`[\w.]+(\(\w+=\))?`", name), name
        assert here in ("same", "different", "not here"), f"{name}: {here}"
        assert is_here(name.strip("`")) == (here != "not here"), f"{name} is said to be {here}"
        assert here == "same" or note, f"{name} needs a note"


@pytest.mark.parametrize("library", DOCUMENTED)
def test_every_documented_name_has_one_row(library):
    found = [name.strip("`") for page in pages() for name, *_ in rows(page) if name.startswith(f"`{library}.")]
    assert sorted(found) == sorted(documented(library))

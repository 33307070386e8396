"""A Ray cluster on this machine, for the tests: it says where it is, and ends when its standard input does."""

import sys

import ray

if __name__ == "__main__":
    ray.init(
        num_cpus=int(sys.argv[2]),
        num_gpus=0,
        resources={"reader": 4},
        include_dashboard=False,
        object_store_memory=200 << 20,
        configure_logging=False,
        log_to_driver=False,
        _temp_dir=sys.argv[1],
        _system_config={"worker_niceness": 0},
    )
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
    ray.shutdown()

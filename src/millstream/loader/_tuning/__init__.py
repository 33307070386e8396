"""How a pipeline is read fastest on this machine: stages are timed, executors tried."""

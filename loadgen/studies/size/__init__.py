"""From a capacity to replicas and GPUs."""

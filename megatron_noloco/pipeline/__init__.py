"""Pipeline: process groups of a replica and Megatron-core's schedules with routes between the replicas."""

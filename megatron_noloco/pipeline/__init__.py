"""Process groups of a replica, and Megatron-core's pipeline schedules with routes between the replicas."""

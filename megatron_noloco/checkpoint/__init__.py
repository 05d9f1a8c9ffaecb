"""Checkpoints of an ensemble: every rank writes its own files, and no rank waits for another.

    checkpoints/step_00001000/replica_02/
        mp_rank_00_model_states.pt                        DeepSpeed: module, schedule, counters (dp 0)
        zero_pp_rank_0_mp_rank_00_optim_states.pt         DeepSpeed: inner optimizer, master weights
        stage_00_dp_00_tp_00.safetensors             slow weights, outer momentum, random states
        stage_00_dp_00_tp_00.json                    manifest: sizes and checksums, written last
    checkpoints/latest                                    name of the newest complete step folder

A step is complete when the manifests of all ranks are there; the rank that completes it writes `latest`.
"""

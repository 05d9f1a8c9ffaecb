"""Checkpoints of an ensemble: every rank writes its own files, and no rank waits for another.

    checkpoints/step_00001000/replica_02/
        stage_00_dp_00_tp_00.safetensors            slow weights: the model
        resume_stage_00_dp_00_tp_00.safetensors     all else that a resume needs: optimizers, random states
        stage_00_dp_00_tp_00.json                   manifest: sizes, checksums, layout, numbers; written last
    checkpoints/latest                              name of the newest complete step folder

A step is complete when the manifests of all ranks are there; the rank that completes it writes `latest`.

Everything with one number for each weight lies in flat vectors whose layout the manifest describes. So a run
continues with any stages, tensor-parallel and data-parallel sizes: a rank fills its own vectors, parameter by
parameter (`restore.RankReader`).
"""

"""vLLM as the rollout engine: in a server of its own (`server_engine`) or in the training processes (`colocate`).

`loading`, `weight_transfer`, `worker_extension`, `engine_parameters` and `served_images` are for processes where vLLM runs, and import it;
nothing else does before an engine is made.
"""

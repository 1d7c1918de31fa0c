"""An SGLang plug-in for tests on a CPU: seeds count there too, and the engine's processes are forked, which starts them in a second or two."""

import multiprocessing


def load() -> None:
    from sglang.srt import server_args
    from sglang.srt.entrypoints import engine
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for backends in (
        server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        server_args.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
    ):
        if "torch_native" not in backends:
            backends.append("torch_native")
    for module in ("batch_invariant_ops", "batch_invariant_ops.batch_invariant_ops"):  # triton kernels
        HookRegistry.register(
            f"sglang.srt.{module}.enable_batch_invariant_mode", lambda *_, **__: None, HookType.REPLACE
        )
    forking = multiprocessing.get_context("fork")
    forking.set_start_method = lambda *_, **__: None
    engine.mp = forking

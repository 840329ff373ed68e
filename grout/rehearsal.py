"""The warm-up of an engine rehearsed where nothing runs, so that its kernels are ready for it.

While weights are read, the host and the GPU have little to do, and which kernels an engine needs
does not depend on weights.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import tilert
from grout.config import EngineConfig
from grout.runner import Runner
from models.config import ModelConfig
from models.slot import Features
from models.transformer import Transformer
from tilert.rehearsal import Rehearsal

WarmUp = tuple[Sequence[int], Sequence[int], Sequence[Features]]

logger = logging.getLogger(__name__)


@contextmanager
def rehearsed(
    config: EngineConfig,
    model: ModelConfig,
    device: tilert.Device,
    dtype: tilert.DType,
    limit: int,
    warm_up: WarmUp,
    report: Callable[[str], None],
) -> Iterator[threading.Event]:
    """Have the kernels of a warm-up compiled or loaded, on other threads, within the block.

    Gives what is set once they are.

    Args:
        limit: longest context, in tokens.
        warm_up: what `Runner.warm_up` will be called with.
        report: told at the end how many there are, and how long that took.
    """
    ready = threading.Event()
    if device.kind == "cpu":
        ready.set()
        yield ready
        return
    stand_in, start, seconds = Rehearsal(device), time.monotonic(), 0.0

    def rehearse() -> None:
        try:
            # All layers have the same kernels, and a cache of any size.
            one, longest = replace(model, num_layers=1), min(limit, max(warm_up[0]))
            transformer = Transformer.random(one, stand_in, dtype, max_len=longest)
            pages = config.max_num_seqs * -(-longest // transformer.page_size)
            cache = transformer.new_cache(pages, config.max_num_seqs)
            runner = Runner(
                transformer, cache, max_num_seqs=config.max_num_seqs, eager=config.enforce_eager
            )
            runner.warm_up(*warm_up)
        except Exception:
            # The warm-up itself meets whatever it is, where it can be told.
            logger.debug("the warm-up was not rehearsed to its end", exc_info=True)
        stand_in.finish()
        nonlocal seconds
        seconds = time.monotonic() - start
        ready.set()

    thread = threading.Thread(target=rehearse, name="grout-rehearsal", daemon=True)
    thread.start()
    try:
        yield ready
    except BaseException:
        stand_in.cancel()
        raise
    finally:
        thread.join()
    report(f"{stand_in.made} kernels were ready after {seconds:.2f} s")


__all__ = ["rehearsed"]

"""How full a client that is not told an engine's limit keeps the engine, in virtual time.

    python benchmarks/slots.py [--seeds 3]

An engine has so many slots. It refuses what comes beyond (429), or lets it wait, and refuses a share of all requests by
chance. The share of what its slots could do is that of the first minutes, in which the limit has to be found, too; the
worst of all seeds, with replies of one length and with a heavy tail.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import math
from collections.abc import Callable
from random import Random

from benchmarks.table import Table, options
from benchmarks.virtual_time import run
from reasonrag.core.calls import Slots, Unavailable

SIZES, CHANCES, SPREADS = (8, 64, 200), (0.0, 0.2, 0.4), (0.0, 1.0)
LEAST = ">= 0.75"


class Engine:
    """Serves in virtual time: 0.1 s and 0.02 s a token for each request, whose speed depends on how many there are.

    Args:
        speed: of one request by the number of requests, as a share of that of a request alone.
        slots: requests served at a time; the others wait in their order.
        refuses: answers 429 or 503 while it has this many.
        chance: refuses this share of requests, however many it has.
    """

    def __init__(
        self,
        *,
        slots: int = 10**6,
        speed: Callable[[int], float] = lambda n: 1.0,
        refuses: int = 10**6,
        chance: float = 0.0,
        seed: int = 1,
    ):
        self.busy_s = 0.0  # of requests, in seconds of a request alone
        self.asked = self.served = 0
        self._slots = asyncio.Semaphore(slots)
        self._speed, self._refuses, self._chance, self._rng = speed, refuses, chance, Random(seed)
        self._running: list[tuple[float, int, asyncio.Future[None]]] = []
        self._at = self._work = 0.0
        self._requests = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    async def answer(self, tokens: int) -> bool:
        self.asked += 1
        if len(self._running) >= self._refuses or self._rng.random() < self._chance:
            await asyncio.sleep(0.01)
            return False
        async with self._slots:
            done = asyncio.get_running_loop().create_future()
            self._advance()
            need_s = 0.1 + 0.02 * tokens
            heapq.heappush(self._running, (self._work + need_s, next(self._requests), done))
            self._plan()
            await done
            self.busy_s += need_s
        self.served += 1
        return True

    def _advance(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._running:
            self._work += (now - self._at) * self._speed(len(self._running))
        self._at = now

    def _plan(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._running:
            left_s = max(self._running[0][0] - self._work, 0.0) / self._speed(len(self._running))
            self._timer = asyncio.get_running_loop().call_later(left_s, self._finish)

    def _finish(self) -> None:
        self._advance()
        while self._running and self._running[0][0] <= self._work + 1e-9:
            done = heapq.heappop(self._running)[2]
            if not done.done():  # cancelled at the end
                done.set_result(None)
        self._plan()


async def drive(
    engine: Engine, slots: Slots, *, seconds: float, askers: int = 2000, spread: float = 0.6, seed: int = 0
) -> list[int]:
    """Keep the engine asked for some time, as `ServerLLM` does; return the limits at the replies of the second half.

    Replies have 60 tokens in the median; `spread` is the standard deviation of their logarithm.
    """
    loop, rng, limits = asyncio.get_running_loop(), Random(seed), []

    async def ask() -> None:
        while loop.time() < seconds:
            tokens = min(max(round(rng.lognormvariate(math.log(60), spread)), 8), 512)
            request = slots.request()
            wait_s = 0.125
            while True:
                with contextlib.suppress(Unavailable):
                    async with request:
                        if not await engine.answer(tokens):
                            raise Unavailable("full", status=429)
                        request.tokens = tokens
                    break
                await asyncio.sleep(wait_s * rng.uniform(0.5, 1.0))
                wait_s = min(2 * wait_s, 30.0)
            if loop.time() > seconds / 2:
                limits.append(slots.limit)

    await asyncio.gather(*(ask() for _ in range(askers)))
    return limits


def measure(size: int, chance: float, refuses: bool, spread: float, seed: int) -> tuple[float, float]:
    """Return the share of its slots that an engine used, and requests per reply, less those refused by chance."""
    engine = Engine(refuses=size, chance=chance, seed=seed) if refuses else Engine(slots=size, chance=chance, seed=seed)
    seconds = 1.3 * (60 + 3000 / size)

    async def for_some_time() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await drive(engine, Slots(), seconds=math.inf, askers=1600, spread=spread, seed=seed)

    run(for_some_time())
    return engine.busy_s / (size * seconds), engine.asked * (1 - chance) / engine.served


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="runs of each kind of reply")
    given = parser.parse_args()
    table = Table(__doc__)
    most = dict.fromkeys((True, False), 0.0)
    for refuses, chance, size in itertools.product(most, CHANCES, SIZES):
        cells = itertools.product(SPREADS, range(given.seeds))
        found = [measure(size, chance, refuses, spread, seed) for spread, seed in cells]
        what = f"{'refuses' if refuses else 'lets wait'} beyond {size} slots, {chance:.0%} by chance"
        table.row(what, min(share for share, _ in found), "of its slots", limit=LEAST)
        most[refuses] = max(most[refuses], *(requests for _, requests in found))
    for refuses, requests in most.items():
        table.row(f"requests per reply, {'refused' if refuses else 'waiting'} beyond the slots", requests, limit="<= 2")
    table.note(
        f"the worst of {2 * given.seeds} runs each; 1,600 askers; 60 tokens in the median, 0.1 s and 0.02 s a token"
    )
    table.show(given.json)


if __name__ == "__main__":
    main()

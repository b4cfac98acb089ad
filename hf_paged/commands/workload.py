"""Request lengths like those of two public data sets, drawn with a fixed seed.

PagedAttention (Kwon et al. 2023, figure 11) publishes the *means* of its inputs and outputs, in tokens: Alpaca 19 and
58, ShareGPT 161 and 338. The means are all that is taken from there. What the lengths are drawn from is this project's
choice: a log-normal distribution between the bounds below, with the spread (sigma of the logarithm) below, placed so
that its mean between the bounds is the published one. Inputs and outputs are drawn independently of each other.
"""

import math
import random
from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True)
class Lengths:
    """A truncated log-normal distribution of lengths in tokens.

    Attributes:
        mean: of the truncated distribution.
        sigma: standard deviation of the logarithm, before truncation.
        low, high: bounds, both included.
    """

    mean: float
    sigma: float
    low: int
    high: int

    def draw(self, count: int, generator: random.Random) -> list[int]:
        """`count` lengths in random order.

        One is drawn from each `count`-th part of the distribution, so that the mean of few is near the mean of many.
        """
        normal = self._log_normal()
        first, last = (normal.cdf(math.log(bound)) for bound in (self.low, self.high))
        lengths = []
        for part in range(count):
            share = first + (last - first) * (part + generator.random()) / count
            length = round(math.exp(normal.inv_cdf(min(max(share, 1e-12), 1 - 1e-12))))
            lengths.append(min(max(length, self.low), self.high))
        generator.shuffle(lengths)
        return lengths

    def _log_normal(self) -> NormalDist:
        """The normal distribution of the logarithm that gives the wanted mean, found by bisection."""
        below, above = math.log(self.low), math.log(self.high)
        for _ in range(60):
            middle = (below + above) / 2
            if self._truncated_mean(middle) < self.mean:
                below = middle
            else:
                above = middle
        return NormalDist(middle, self.sigma)

    def _truncated_mean(self, mu: float) -> float:
        """Mean of a log-normal variable given that it lies between the bounds."""
        unit = NormalDist()
        low, high = ((math.log(bound) - mu) / self.sigma for bound in (self.low, self.high))
        inside = unit.cdf(high) - unit.cdf(low)
        weighted = unit.cdf(high - self.sigma) - unit.cdf(low - self.sigma)
        return math.exp(mu + self.sigma**2 / 2) * weighted / inside


@dataclass(frozen=True)
class Workload:
    """Requests of one kind.

    Attributes:
        name: of the data set whose means they have.
        inputs: prompt lengths.
        outputs: numbers of new tokens.
        requests: how many a benchmark takes unless it is told another number.
    """

    name: str
    inputs: Lengths
    outputs: Lengths
    requests: int

    def draw(self, count: int, seed: int = 0) -> list[tuple[int, int]]:
        """`count` requests: tokens of the prompt and new tokens of each, the same for the same seed."""
        generator = random.Random(f"{self.name} {seed}")
        return list(zip(self.inputs.draw(count, generator), self.outputs.draw(count, generator), strict=True))


# An output has at least two tokens: the first comes from the prompt's own forward, before any decode step. The upper
# bounds add up to the 2,048 tokens that are taken for the longest sequence.
WORKLOADS = {
    "alpaca": Workload("alpaca", Lengths(19, 0.5, 5, 128), Lengths(58, 0.8, 2, 512), requests=100),
    "sharegpt": Workload("sharegpt", Lengths(161, 1.0, 5, 1024), Lengths(338, 0.8, 2, 1024), requests=16),
}

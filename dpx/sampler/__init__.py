"""Samplers, which draw the units of a step as indices on the host, and declare the properties that an accountant may assume."""

from dpx.sampler.epochs import BallsInBins as BallsInBins
from dpx.sampler.epochs import Deterministic as Deterministic
from dpx.sampler.epochs import Shuffled as Shuffled
from dpx.sampler.fixed_size import FixedSize as FixedSize
from dpx.sampler.poisson import CyclicPoisson as CyclicPoisson
from dpx.sampler.poisson import Poisson as Poisson
from dpx.sampler.poisson import TruncatedPoisson as TruncatedPoisson
from dpx.sampler.random_allocation import RandomAllocation as RandomAllocation
from dpx.sampler.sampler_protocol import Sampler as Sampler
from dpx.sampler.sampler_protocol import draw as draw

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

# Last: the function `poisson` takes the place of the module of that name.
from dpx.sampler.batches import Batch as Batch  # isort: skip
from dpx.sampler.batches import Batches as Batches
from dpx.sampler.batches import balls_in_bins as balls_in_bins
from dpx.sampler.batches import cyclic_poisson as cyclic_poisson
from dpx.sampler.batches import deterministic as deterministic
from dpx.sampler.batches import fixed_size as fixed_size
from dpx.sampler.batches import poisson as poisson
from dpx.sampler.batches import random_allocation as random_allocation
from dpx.sampler.batches import shuffled as shuffled
from dpx.sampler.batches import truncated_poisson as truncated_poisson

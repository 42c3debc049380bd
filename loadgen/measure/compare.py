"""The public path of `compare` and `measure_noise`; the code is in `measure.comparison`."""

from loadgen.measure.comparison.compare import Comparison as Comparison
from loadgen.measure.comparison.compare import compare as compare
from loadgen.measure.comparison.compare import measure_noise as measure_noise

"""An honest benchmark: every method against the same baseline, interleaved in one process, losslessness checked on the way."""

from eyas.bench.measure import Protocol
from eyas.bench.records import Record, Run, read_run
from eyas.bench.run import BenchOptions, run_bench

__all__ = ["BenchOptions", "Protocol", "Record", "Run", "read_run", "run_bench"]

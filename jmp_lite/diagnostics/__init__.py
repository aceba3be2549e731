"""Diagnosis of a training step. This file lists the public names.

The rooms, in the reading order:

- `_values`: measures values inside a program.
- `_precision`: `compare_precision` finds the modules that cost accuracy.
- `_nonfinite`: `find_nonfinite` finds the operation at which a value becomes inf or NaN, and tries remedies.
- `_ranges`: `profile_ranges` counts the values that half precision loses, and suggests a loss scale.
- `_findings`: the faults of all reports, in one form.
- `_doctor`: `doctor` runs all of them, and reads the compiled program with `jmp_lite.programs`.
"""

from ._doctor import Diagnosis as Diagnosis
from ._doctor import doctor as doctor
from ._findings import Finding as Finding
from ._nonfinite.find import find_nonfinite as find_nonfinite
from ._nonfinite.report import Nonfinite as Nonfinite
from ._nonfinite.report import NonfiniteReport as NonfiniteReport
from ._nonfinite.report import Trial as Trial
from ._precision.compare import compare_precision as compare_precision
from ._precision.report import Difference as Difference
from ._precision.report import ModuleDifference as ModuleDifference
from ._precision.report import PrecisionReport as PrecisionReport
from ._ranges.magnitudes import Fates as Fates
from ._ranges.magnitudes import Magnitudes as Magnitudes
from ._ranges.profile import ModuleRange as ModuleRange
from ._ranges.profile import RangeReport as RangeReport
from ._ranges.profile import profile_ranges as profile_ranges

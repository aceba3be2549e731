"""What casting every value does, by NumPy: the counts that `profile_ranges` is compared with."""

import ml_dtypes
import numpy as np

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def cast(values, exponent, dtype):
    """What becomes of values times 2**exponent, by casting every one of them."""
    values = np.asarray(values, np.float64).ravel()
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        wide = (values * 2.0**exponent).astype(np.float64)
        # NumPy casts float64 to float16 in one rounding; ml_dtypes goes through float32.
        half = np.abs(wide.astype(dtype).astype(np.float64))
    least = float(ml_dtypes.finfo(dtype).smallest_normal)
    finite = np.isfinite(values)
    nonzero = finite & (values != 0)
    return (
        int((finite & (values == 0)).sum()),
        int((nonzero & (half == 0)).sum()),
        int((nonzero & (half > 0) & (half < least)).sum()),
        int((nonzero & (half >= least) & np.isfinite(half)).sum()),
        int((nonzero & np.isinf(half)).sum()),
        int((~finite).sum()),
    )


def counts(fates):
    return (
        fates.zeros,
        fates.flushed,
        fates.subnormal,
        fates.normal,
        fates.overflowed,
        fates.nonfinite,
    )

"""Which runs `served.py` does, by name; what the tests of them go through as well."""

EVERYTHING = {"clip": 0.5, "ema": 0.9, "schedule": "cosine", "warmup": 2}
EXACT = {
    "plain": {},
    "all": EVERYTHING,
    "bf16": {**EVERYTHING, "amp": "bf16"},
    "fp16": {**EVERYTHING, "amp": "fp16"},
    "float64": {**EVERYTHING, "dtype": "float64", "optimizer": "adamw"},
}
LIMITS = (1, 4)

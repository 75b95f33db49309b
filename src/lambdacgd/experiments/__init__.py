"""The paper's tables and figures, regenerated, and what goes beyond them. Each module has ``run(out, quick=…)``."""

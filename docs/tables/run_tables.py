"""What end-to-end runs, load runs and tests on a GPU gave."""

from __future__ import annotations

from result_files import Parts

PARTS = Parts()

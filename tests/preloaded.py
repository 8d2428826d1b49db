"""Imported by the process that `tests.warmed` forks from: the package, and the libraries of training."""

from __future__ import annotations

import gc
import pkgutil
from importlib import import_module

import datasets
import matplotlib.figure
import peft
import pytest
import transformers
import trl.trainer.dpo_trainer
import trl.trainer.grpo_trainer
import trl.trainer.sft_trainer

import reasonrag
from tests import unsynced

IMPORTED = (datasets, matplotlib, peft, pytest, transformers, trl, unsynced)

for module in pkgutil.walk_packages(reasonrag.__path__, "reasonrag."):
    if not module.name.endswith("__main__"):
        import_module(module.name)

gc.collect()
gc.freeze()  # processes that are forked from this one neither look through it nor copy its pages

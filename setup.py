"""Everything that is constant is in pyproject.toml; here is what depends on the machine (see fa3_build/plan.py)."""

from setuptools import setup

from fa3_build.commands import setup_arguments
from fa3_build.plan import make_plan

setup(**setup_arguments(make_plan()))

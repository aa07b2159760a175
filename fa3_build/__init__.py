"""How fa3 is built: finds a CUDA compiler, decides whether kernels can be built, compiles them, records the outcome.

backend.py   the PEP 517 backend: setuptools plus build requirements that depend on the machine
plan.py      decides whether kernels can be built here, with what and from which files, or gives the reason why not
toolkit.py   finds CUDA toolkits, and says how many compile jobs this machine can run
commands.py  the setuptools commands: compile with torch's ninja builds, write fa3/build_report.json
compile.py   runs one compiler call, through ccache if it is installed, and keeps its time and its messages
ptxas.py     reads registers, spills and warnings from ptxas's messages

Nothing here is part of the installed package.
"""

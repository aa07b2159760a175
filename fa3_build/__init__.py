"""How fa3 is built: finds a CUDA compiler, decides whether kernels can be built, compiles them, records the outcome.

backend.py   the PEP 517 backend: setuptools plus build requirements that depend on the machine
plan.py      can kernels be built here, with what, and which source files; or the reason why not
toolkit.py   CUDA toolkits on this machine, and how many compile jobs it can bear
commands.py  the setuptools commands: compile with torch's ninja builds, write fa3/build_report.json
compile.py   runs one compiler call, through ccache if there is one, and keeps its time and its messages
ptxas.py     reads registers, spills and warnings from ptxas's messages

Nothing here is part of the installed package.
"""

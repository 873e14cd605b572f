"""The small study: models at the same size, data, seeds and budget, measured and compared.

`bash eval/small_study.sh` or `python -m eval.small_study`. questions.py says what is compared,
plan.py what is run, execute.py runs it, tune.py chooses rates, collect.py compares, tables.py and
figure.py show.
"""

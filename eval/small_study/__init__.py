"""The small study: nine models at the same size, data, seeds and budget, measured and compared.

`bash eval/small_study.sh` or `python -m eval.small_study`. plan.py says what is run, execute.py
runs it, comparison.py compares, tables.py and figure.py show.
"""

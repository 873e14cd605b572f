"""The studies, a file each: `python -m eval.study NAME`."""

from cat_lm.core.registry import Registry
from eval.lab.study import Study

STUDIES: Registry[Study] = Registry(
    "study", Study, package="eval.studies", separator="-", words=("name", "title")
)

"""Starting the project: the scripts' environment and the main job."""

import cat_lm  # noqa: F401 -- before all others: it drops the working directory from the path

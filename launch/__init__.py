"""Starting the project: the scripts' environment and the main job."""

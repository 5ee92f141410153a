"""`dustin-trt bench`: each benchmark checks its results, takes turns, and says where it ran."""

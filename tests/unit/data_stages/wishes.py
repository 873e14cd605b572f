"""What the tests of the preparation's stages ask for."""

# Several shards, a set that is gone through twice, and a second round of encoding.
WISHES = ("--tokens", "60K", "--mixture", "Large=2,Middle=1,Small=1", "--shard-tokens", "9K")

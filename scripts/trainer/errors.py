"""The exceptions a user is meant to read."""


class TrainerError(Exception):
    """Something the user can put right: one sentence with what is wrong, where, and what to do.

    Scripts print it without a traceback (see `trainer.job`); every other exception is a bug of ours.
    """


class StoppedError(TrainerError):
    """A job was asked to stop, and kept what it has."""

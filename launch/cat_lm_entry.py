"""What torch calls when it is imported: installed beside cat_lm, and there without its checkout.

torch ends its own import with an error where an entry point fails, for all programs of the
environment. An editable install leads nowhere once its checkout has moved; this file is a copy.
"""

import contextlib
import warnings


def install() -> None:
    """Make transformers' Auto classes know cat_lm's models; warn where cat_lm has gone."""
    try:
        from cat_lm import _auto

        _auto.install()
    except Exception as error:
        with contextlib.suppress(Warning):  # `python -W error`
            warnings.warn(
                f"cat_lm cannot be imported, and transformers does not know its models ({error}); "
                "install it again from where its checkout is, or uninstall it",
                stacklevel=2,
            )

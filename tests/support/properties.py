"""How often a property is tried."""

from hypothesis import settings


def tried(most: int = 100, **others) -> settings:
    """`most` examples in the full profile (`make test-all`), a fifth of them otherwise; `others` as hypothesis takes them."""
    return settings(max_examples=max(5, most * settings.default.max_examples // 100), deadline=None, **others)

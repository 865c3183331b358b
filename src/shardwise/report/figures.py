"""Numbers of tables, short and without their units where the column has them."""


def gigabytes(num_bytes: float) -> str:
    value = num_bytes / 1e9
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 0.05 else f"{value:.2g}"


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1e3:.3g} ms" if value < 0.9995 else f"{value:.2f} s" if value < 99.95 else f"{value:,.0f} s"


def whole(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"

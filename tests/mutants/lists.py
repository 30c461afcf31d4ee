"""All lists of mutants."""

from tests.mutants import adapters, collectives, engines, observe, quantization

SOURCES = (
    *quantization.SOURCES,
    *collectives.SOURCES,
    *observe.SOURCES,
    *engines.SOURCES,
    *adapters.SOURCES,
)

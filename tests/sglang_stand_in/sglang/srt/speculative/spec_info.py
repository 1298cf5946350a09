from .spec_registry import REGISTERED


class SpeculativeAlgorithm:
    @staticmethod
    def register(name, *, supports_overlap, validate_server_args, spec_class):
        def decorate(factory):
            REGISTERED[name] = spec_class(name)
            return factory

        return decorate

    def create_future_map(self):
        raise AssertionError("nothing is scheduled here")

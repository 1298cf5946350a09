REGISTERED = {}


class CustomSpecAlgo:
    def __init__(self, name):
        self.name = name


def get_spec(name):
    return REGISTERED.get(name)

from enum import Enum


class HookType(Enum):
    AFTER = "after"


class HookRegistry:
    hooks = {}

    @classmethod
    def register(cls, target, hook, hook_type):
        cls.hooks[target] = hook

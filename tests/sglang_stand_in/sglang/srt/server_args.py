KNOWN = [
    "model_path",
    "tp_size",
    "ep_size",
    "pp_size",
    "dp_size",
    "device",
    "dtype",
    "context_length",
    "max_running_requests",
    "skip_tokenizer_init",
    "attention_backend",
    "sampling_backend",
    "grammar_backend",
    "disable_radix_cache",
    "stream_interval",
    "random_seed",
    "log_level",
    "disable_cuda_graph",
    "max_total_tokens",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_dflash_block_size",
    "speculative_num_draft_tokens",
    "trust_remote_code",
]


class ServerArgs:
    def __init__(self, **arguments):
        for name in arguments:
            if name not in KNOWN:
                raise TypeError(f"ServerArgs.__init__() got an unexpected keyword argument '{name}'")
        for name in KNOWN:
            setattr(self, name, arguments.get(name))

    def check_server_args(self):
        pass

"""Mutants of formats, layouts, random bits, the definition, and counters of bytes."""

from tests.mutants import M, Source

RANDOM = "tests/quantization/test_random.py"
LAYOUT = "tests/quantization/test_layout.py"
REFERENCE = "tests/quantization/test_reference.py"
SUMS = "tests/quantization/test_reference_sums.py"
USER_CACHE = (
    "tests/kernels/test_user_cache.py::test_the_folders_that_were_used_last_are_kept",
    "tests/kernels/test_user_cache.py::test_each_version_and_processor_has_a_folder",
    "tests/kernels/test_user_cache.py::test_a_folder_of_another_user_is_not_read",
    "tests/kernels/test_user_cache.py::test_functions_of_others_and_a_place_of_the_user_are_left_to_numba",
)
TABLES = "tests/quantization/test_tables.py"

SOURCES = (
    Source(
        "sdp4bit/quantization/tables.py",
        (TABLES,),
        (
            M("if argument.dtype is torch.int64 else argument.data_ptr()", "if True else 0"),
            M("if self._known != backend:", "if False:"),
            M("ops.CHECKS[each.operator](**each.bind(call, tensors))", "each.bind(call, tensors)"),
        ),
    ),
    Source(
        "sdp4bit/quantization/random.py",
        (RANDOM,),
        (
            M(
                "first=self.first + row * self.row_stride",
                "first=self.first + row",
                tests=("tests/collectives/test_properties.py",),
            ),
            M(
                "_mixed(self.start + piece * self.step & _MASK64), dither=True",
                "_mixed(self.start), dither=True",
            ),
            M("(1 << STEP_BITS - (bucket >> BUCKET_BITS).bit_length()) - 1", "(1 << STEP_BITS) - 1"),
            M(
                "step = (call * self.count + self.number) & self.mask",
                "step = (call + self.number) & self.mask",
                tests=("tests/collectives/test_properties.py",),
            ),
            M("+ self.number) & self.mask", "+ self.number)", tests=(TABLES,)),
            M("if step < 0:", "if step < -1:"),
            M("if not 0 <= value < 1 << bits:", "if not 0 <= value <= 1 << bits:"),
            M('int(f"{page:0{STEP_BITS}b}"[::-1], 2)', 'int(f"{page:0{STEP_BITS}b}", 2)'),
            M("if buckets > MAX_BUCKETS:", "if buckets >= MAX_BUCKETS:"),
            M("if ranks > MAX_RANKS:", "if ranks >= MAX_RANKS:"),
            M(
                "KeySeries(_counter(seed, stream), rank_step * _STREAM & _MASK64)",
                "KeySeries(_counter(seed, stream), _STREAM & _MASK64)",
            ),
            M(
                'int(f"{sender & 0xFF:08b}"[::-1], 2)',
                'int(f"{sender & 0xFF:08b}", 2)',
                tests=(
                    "tests/collectives/test_error_theory.py::test_dithers_of_senders_with_equal_values_cancel",
                ),
            ),
            M(
                "return value - (1 << 32) if value >= 1 << 31 else value",
                "return value - (1 << 32) if value > 1 << 31 else value",
                survives="2**31 and -2**31 are the same int32",
            ),
            M("return (x >> bits) & (_MASK32 >> bits)", "return x >> bits"),
            M("end > MAX_ELEMENTS", "end >= MAX_ELEMENTS"),
            M("(row_stride // 2) + first // 2", "(row_stride // 2)"),
            M("[mixed & 0xFFFF, _shift_right(mixed, 16)]", "[_shift_right(mixed, 16), mixed & 0xFFFF]"),
        ),
    ),
    Source(
        "sdp4bit/quantization/layout.py",
        (LAYOUT,),
        (
            M("return -(-value // multiple) * multiple", "return (value // multiple + 1) * multiple"),
            M(
                "SCALE_BYTES / group_size if format.has_scales",
                "SCALE_BYTES / group_size if not format.has_scales",
            ),
            M("self.group_size < BLOCK or self.group_size % BLOCK", "self.group_size < BLOCK"),
            M("self.numel < 0 or self.parts < 1", "self.numel < 0 or self.parts < 0"),
            M(
                "return -(-self.padded_numel // self.group_size) if",
                "return self.padded_numel // self.group_size if",
            ),
            M("return self.parts * self.code_bytes", "return self.code_bytes"),
            M(
                "self.scales_offset + self.parts * self.groups * SCALE_BYTES",
                "self.scales_offset + self.groups * SCALE_BYTES",
            ),
            M("values = self.parts * self.numel", "values = self.numel"),
        ),
    ),
    Source(
        "sdp4bit/quantization/formats.py",
        (REFERENCE, "tests/quantization/test_ops.py", "tests/quantization/test_formats.py"),
        (
            M("return self.largest > 0", "return self.largest > 1"),
            M(
                "return self.block_bytes * 8 / BLOCK",
                "return self.block_bytes * 9 / BLOCK",
                tests=("tests/quantization", "tests/test_config.py", "tests/lab/plan/test_traffic.py"),
            ),
            M("return self.largest + 1", "return self.largest"),
            M("codes.new_tensor([[0], [4]])).sum(-2).byte()", "codes.new_tensor([[4], [0]])).sum(-2).byte()"),
            M(
                "return nibbles.flatten(-2).char() - self.offset",
                "return nibbles.flatten(-2).char() - self.largest",
            ),
            M(
                "differs = ~is_zero.unflatten(-1, self._SHAPE).all(-2",
                "differs = ~is_zero.unflatten(-1, self._SHAPE).any(-2",
            ),
            M("(pairs[..., 1:, :] > self.largest)", "(pairs[..., 1:, :] >= self.largest)"),
        ),
    ),
    Source(
        "sdp4bit/quantization/hadamard.py",
        ("tests/quantization/test_hadamard.py",),
        (
            M("[low + high, low - high]", "[low + high, high - low]"),
            M("STRIDES = (1, 2, 4, 8, 16)", "STRIDES = (16, 8, 4, 2, 1)"),
            M("INVERSE_FACTOR = 1.0 / BLOCK", "INVERSE_FACTOR = 2.0 / BLOCK"),
        ),
    ),
    Source(
        "sdp4bit/traffic.py",
        (
            "tests/test_traffic.py",
            "tests/collectives/test_plan.py",
            "tests/lab/plan/test_traffic.py",
            "tests/engines/fsdp2/test_bytes.py",
        ),
        (
            M(
                '"inter": self.nodes // self.blocks, "outer": self.blocks}',
                '"inter": self.nodes, "outer": self.blocks}',
            ),
            M('"outer": self.size // self.blocks}', '"outer": self.size}'),
            M(
                "getattr(self, f.name) - getattr(other, f.name)",
                "getattr(self, f.name)",
                tests=("tests/test_traffic.py::test_differences_are_of_all_fields",),
            ),
            M("if self.plain_inter_bytes or self.inter_bytes:", "if self.inter_bytes:"),
            M('return float("inf") if plain else 1.0', "return 1.0"),
            M("between = grid.nodes if grid.nodes > 1 else 0", "between = grid.nodes"),
            M(
                "padding_bytes\n        step.collectives += 1\n        self.collectives += 1",
                "padding_bytes\n        step.collectives += 1",
                tests=("tests/engines/test_silence.py",),
            ),
            M(
                "self.last_step, self.current_step = self.current_step, Traffic()",
                "self.last_step, self.current_step = self.current_step, self.current_step",
            ),
            M("step.padding_bytes += padding_bytes", "step.padding_bytes = padding_bytes"),
            M("nodes[1:] + nodes[:1]", "nodes[1:] + nodes[-1:]"),
            M("return (size - 1) * (size - between) / size, (size", "return (size - 1) * size / size, (size"),
        ),
    ),
    Source(
        "sdp4bit/config.py",
        ("tests/test_config.py",),
        (
            M(
                '_check_at_least("telemetry.interval", self.interval, 1)',
                '_check_at_least("telemetry.interval", self.interval, 0)',
            ),
            M("if self.thresholds == (None,) * 4:", "if self.thresholds == (None,) * 3:"),
            M(
                "if self.alerts is not None and self.telemetry is None:",
                "if self.alerts is None and self.telemetry is None:",
            ),
        ),
    ),
    Source(
        "sdp4bit/kernels/cpu/user_cache.py",
        USER_CACHE,
        (
            M(
                "binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()",
                "binding.get_host_cpu_features().flatten()",
            ),
            M("sorted(used, reverse=True)[_MOST_FOLDERS:]", "sorted(used)[_MOST_FOLDERS:]"),
            M("if folder.stat().st_uid != os.geteuid() or not", "if not"),
            M("        os.utime(folder)\n", ""),
            M("if numba.config.CACHE_DIR or Path", "if Path"),
        ),
    ),
)

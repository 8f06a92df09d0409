# Every tests/fuzz/fuzz_<name>.c is a libFuzzer target, its seeds lie in tests/fuzz/<name>.
# What it finds beside, and inputs that break something, are kept in build/fuzz.
seconds ?= 60
FUZZERS := $(patsubst tests/fuzz/fuzz_%.c,build/fuzz/%,$(wildcard tests/fuzz/fuzz_*.c))
$(foreach f,$(FUZZERS:build/fuzz/%=%),$(eval $(OUT)/tests/fuzz/test_$(f): tests/fuzz/fuzz_$(f).c))

fuzz: deps-fuzz ## feed random bytes to what reads files and connections
	@$(MAKE) --no-print-directory -j$(jobs) $(FUZZERS)
	@for f in $(FUZZERS); do mkdir -p $$f.found; echo "fuzz: $${f##*/}"; \
		$$f -max_total_time=$(seconds) -max_len=4096 -artifact_prefix=$$f. $$f.found \
			tests/fuzz/$${f##*/} >$$f.log 2>&1 || { tail -n 40 $$f.log; exit 1; }; \
		tail -n 1 $$f.log; done

build/fuzz/wire: LIBS += -luv -lsodium
build/fuzz/config build/fuzz/tokenizer build/fuzz/gguf: LIBS += -lcjson -lpcre2-8

build/fuzz/%: tests/fuzz/fuzz_%.c $(HEADERS)
	@mkdir -p $(@D)
	clang -std=c99 -O1 -g -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all \
		$(CONFIG_nosimd) -o $@ $< $(LIBS)

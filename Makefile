# Two commands are enough: make install, make train. Everything else is for developers.
# ARGS are passed on: make train ARGS="tiny-sync seed=1", make test ARGS="tests/sync -x"

.PHONY: install train models vllm test test-slow test-trl test-vllm lint types layers bench clean

install:
	@scripts/install

train: install
	@scripts/train $(ARGS)

models: install
	@scripts/models $(ARGS)

test: install
	@scripts/check
	@scripts/test $(ARGS)

test-slow: install
	@scripts/test -m slow $(ARGS)

test-trl: install
	@scripts/test-trl $(ARGS)

vllm: install
	@scripts/vllm-env

test-vllm: install
	@scripts/test-vllm $(ARGS)

lint: install
	@scripts/check lint

types: install
	@scripts/check types

layers: install
	@scripts/check layers

bench: install
	@scripts/bench $(ARGS)

clean:
	@scripts/clean

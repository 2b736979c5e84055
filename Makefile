# What people type. Each target installs what it needs (Debian packages, llama.cpp, the model) and says so; a second call is quick.
.PHONY: help build model demo test test-all lint bench clean distclean

help:
	@echo 'make build      the program, at build/release/kvcell (first time: about 6 minutes, llama.cpp is built once)'
	@echo 'make model      the demo model, under build/models; prints its path last'
	@echo 'make demo       a document, two questions, two processes: what kvcell is for'
	@echo 'make test       the fast tests'
	@echo 'make test-all   all tests, sanitizers, fuzz smoke, longer crash loops'
	@echo 'make lint       clang-format, clang-tidy and shellcheck'
	@echo 'make bench      measures, and prints a table'
	@echo 'make clean      removes our build; distclean also what was fetched and llama.cpp'

build:
	@scripts/setup.sh build
	@scripts/llama.sh
	@scripts/build.sh release kvcell_program

model:
	@scripts/setup.sh build
	@scripts/model.sh

demo: build model
	@scripts/demo.sh

test:
	@scripts/setup.sh build
	@scripts/llama.sh
	@scripts/model.sh
	@scripts/build.sh release
	@ctest --preset release -j "$$(nproc)"

test-all:
	@scripts/test_all.sh

lint:
	@scripts/lint.sh

bench: build model
	@scripts/bench.sh

clean:
	rm -rf build/release build/asan build/tsan build/fuzz build/logs

distclean:
	rm -rf build

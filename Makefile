# SPDX-License-Identifier: Apache-2.0
# `make` or `make help` lists the targets.

SHELL       := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

CNI_PLUGINS := bridge host-local loopback portmap bandwidth sriov podlace-pod podlace-podresources
TOOLS       := podlace sriov-device-plugin podlace-node
BIN         := bin
CACHE       ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/podlace
PROGRAMS    := $(CACHE)/programs

DESTDIR     ?=
PREFIX      ?= /usr/local
CNI_BIN_DIR ?= /opt/cni/bin

VERSION     ?= $(or $(shell scripts/version.sh version 2>/dev/null),unknown)
COMMIT      ?= $(or $(shell scripts/version.sh commit 2>/dev/null),unknown)
EPOCH       ?= $(or $(SOURCE_DATE_EPOCH),$(shell scripts/version.sh time 2>/dev/null),0)
LDFLAGS     := -s -w -X github.com/podlace/podlace/pkg/plugin.Version=$(VERSION) -X github.com/podlace/podlace/pkg/cli.commit=$(COMMIT)
# grpc's tracing pages link text/template, with which the linker keeps every exported method: 20 MB of sriov-device-plugin.
GOBUILD     := CGO_ENABLED=0 go build -trimpath -buildvcs=false -tags grpcnotrace -ldflags '$(LDFLAGS)'
GOLANGCI    := v2.15.0
ACTIONLINT  := v1.7.12
CYCLONEDX   := v1.10.0
NFPM        := v2.43.0
HUGO        := v0.165.0

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-13s %s\n", $$1, $$2}' Makefile

.PHONY: build
build: ## build static stripped binaries into bin/
	@command -v go >/dev/null || { echo "build: no go in PATH ($$PATH): build as a user who has Go; the installation needs none" >&2; exit 1; }
	@mkdir -p $(BIN)
	@rm -f $(BIN)/.source
	@$(GOBUILD) -o $(BIN)/ $(addprefix ./plugins/,$(CNI_PLUGINS) $(TOOLS))
	@scripts/source-hash.sh >$(BIN)/.source
	@ls -l $(BIN) | awk 'NR > 1 {printf "%-12s %.1f MB\n", $$9, $$5 / 1e6}'

# All files of the image have the time of the commit, so that the same commit gives the same digest.

.PHONY: image
image: ## build the image for amd64 and arm64 into build/, without docker; PUSH=registry/name:tag pushes it
	@go run -C scripts/image . build -root '$(CURDIR)' -out '$(CURDIR)/build' -name '$(or $(PUSH),$(IMAGE),localhost/podlace:$(VERSION))' \
	  $(if $(PUSH),-push) -ldflags '$(LDFLAGS)' -version '$(VERSION)' -revision '$(COMMIT)' \
	  -epoch '$(EPOCH)'

.PHONY: manifest
manifest: ## print podlace.yaml for kubectl apply; IMAGE=registry/name@sha256:digest, COMPONENTS='vxlan k3s', SRIOV_CONFIG=config.json
	@file='$(SRIOV_CONFIG)'; file=$${file/#'~/'/$$HOME/}; [[ -z $$file || $$file = /* ]] || file=$$PWD/$$file; \
	  go run -C scripts/image . manifest -image '$(IMAGE)' $(COMPONENTS:%=-component %) -sriov-config "$$file"

.PHONY: chart
chart: ## write the Helm chart into build/; IMAGE=registry/name@sha256:digest is its default image, PUSH=registry/folder pushes it
	@go run -C scripts/image . chart -image '$(IMAGE)' -version '$(VERSION)' -epoch '$(EPOCH)' -out '$(CURDIR)/build' $(PUSH:%=-push '%')

.PHONY: demo
demo: build ## run the main job: two pods, hostPorts, limits; no root, no Kubernetes
	@go build -o build/demo ./integration/demo && build/demo -plugins $(BIN) $(ARGS)

.PHONY: test
test: build ## run the tests, each in namespaces of its own; nothing is installed
	@scripts/test.sh $(ARGS)

# Packages whose tests take some seconds at most; the plugins' longer tests are left out by -short.
QUICK := attachment cli cli/reconcile cli/rollback cli/validate daemon/pool daemon/probes fault ipam iptables nft plugin poddevices podlacepod ports reference

.PHONY: quick
quick: ## run the quick tests, with all six plugins, in a minute, without root
	@PACKAGES='./integration/deps $(addprefix ./pkg/,$(QUICK) bandwidth bridge hostlocal loopback portmap sriov)' scripts/test.sh -short $(ARGS)

.PHONY: pod
pod: build ## run the scenarios of integration/plugins and integration/faults with podlace-pod in place of the chain
	@PODLACE_FORM=podlace-pod PACKAGES='./integration/plugins ./integration/faults' scripts/test.sh -skip '^(TestMeasured|(TestOldChain|TestChangeOfForm)$$)' $(ARGS)

# How a goroutine starts.
GOROUTINE := (^|[;{])[[:space:]]*go [A-Za-z_]|[.]Go[(]|AfterFunc[(]|errgroup|httptest[.]New

# Every package of pkg/ and integration/ whose code or tests start goroutines, but for those that mostly drive programs, into which the race
# detector does not see.
RACE = $(filter-out ./integration/docs/ ./integration/e2e/% ./integration/faults/ ./integration/harness/% ./integration/plugins/, \
  $(sort $(dir $(shell grep -rlE '$(GOROUTINE)' --include='*.go' ./pkg ./integration))))

.PHONY: race
race: ## run the tests of all packages with goroutines with Go's race detector (needs gcc)
	@CGO_ENABLED=1 PACKAGES='$(RACE)' scripts/test.sh -race -p 4 -skip '^TestMeasured' $(ARGS)

.PHONY: vm
vm: build ## run the tests of what distribution kernels have in a virtual machine, set up once in the cache (needs root and Debian)
	@VM='$(CACHE)/vm' scripts/vm/test.sh $(ARGS)

.PHONY: kernels
kernels: build ## run the demo and pods of each conflist on Debian's kernels from 5.10 on, each in a virtual machine (needs root and Debian); ARGS='5.10 6.1'
	@VM='$(CACHE)/vm' scripts/vm/kernels.sh $(ARGS)

.PHONY: node
node: build ## run pods with VFs through a real kubelet and a real containerd; the kubelet is built once into the cache (needs root)
	@KUBELET='$(KUBELET)' scripts/node-test.sh '$(PROGRAMS)' $(ARGS)

.PHONY: crio
crio: build ## run pods through a real CRI-O, also with a real kubelet; both are built once into the cache (needs root, conmon and skopeo)
	@KUBELET='$(KUBELET)' scripts/crio-test.sh '$(CACHE)' $(ARGS)

.PHONY: neighbours
neighbours: build ## run firewalld and Docker of Debian's packages beside pods, in namespaces; the packages are unpacked into the cache (needs root)
	@packages=$$(scripts/neighbours.sh '$(CACHE)/neighbours') && NEIGHBOURS=$$packages PODLACE_BIN='$(CURDIR)/$(BIN)' KERNELTEST=require \
	  go test -buildvcs=false -count=1 -v -timeout 30m ./integration/e2e/neighbours $(ARGS)

# What the machine lacks is said before minutes go into building.
.PHONY: cluster-check
cluster-check:
	@scripts/make-cluster.sh check $(ARGS)

.PHONY: cluster
cluster: cluster-check build image ## start a Kubernetes cluster of three nodes with Podlace and open a shell in it; ARGS=-test runs its tests (needs root)
	@IMAGE='$(or $(PUSH),$(IMAGE),localhost/podlace:$(VERSION))' scripts/make-cluster.sh '$(CACHE)' $(ARGS)

# What runs agents against a real API server, with the programs that it needs.
APISERVER = programs=$$(scripts/programs.sh '$(PROGRAMS)' kubernetes etcd kube-apiserver); \
  KUBERNETES=$$programs PODLACE_BIN='$(CURDIR)/$(BIN)' go test -buildvcs=false -count=1 -v -timeout 60m ./integration/e2e/apiserver

.PHONY: apiserver
apiserver: build ## run agents on three nodes against a real etcd and kube-apiserver, which are built once into the cache
	@$(APISERVER) $(ARGS)

SIZES := -nodes 1000,5000

.PHONY: scale
scale: build ## measure an agent among 1,000 and 5,000 nodes of a real API server; ARGS='-nodes 2000 -for 10m'
	@$(APISERVER) -run '^TestScale$$' -args $(or $(ARGS),$(SIZES))

.PHONY: dra
dra: build ## run pods with VFs by ResourceClaims (DRA) in a real cluster of one node; ARGS='-run TestClaim' (needs root)
	@scripts/dra-test.sh '$(CACHE)' $(ARGS)

.PHONY: e2e-check
e2e-check: # a cluster of a kubeconfig needs nothing of this machine
	@set -- $(ARGS); case " $$*" in *' -kubeconfig'* | *' --kubeconfig'*) ;; *) scripts/cluster.sh check ;; esac

.PHONY: e2e
e2e: e2e-check build image reference ## run Kubernetes' own e2e tests of the network; ARGS='-proxy nftables,iptables', ARGS=-reference (needs root and Debian)
	@go run ./integration/e2e/conformance -cache '$(CACHE)' -image '$(or $(PUSH),$(IMAGE),localhost/podlace:$(VERSION))' $(ARGS)

.PHONY: fuzz
fuzz: ## fuzz every parser, FUZZTIME (default 10s) each
	@scripts/fuzz.sh

GOLANGCI_LINT := $(CACHE)/tools/golangci-lint-$(GOLANGCI)

# Other modules of the tree. Those below integration/e2e/programs only pin the versions of programs of other projects.
MODULES := integration/dra-sim integration/e2e/containerd integration/e2e/crio integration/e2e/kubelet integration/monitoring integration/reference \
  scripts/image scripts/package

.PHONY: lint
lint: $(GOLANGCI_LINT) $(CACHE)/tools/actionlint-$(ACTIONLINT) ## golangci-lint and actionlint
	@$(GOLANGCI_LINT) run
	@$(CACHE)/tools/actionlint-$(ACTIONLINT)

.PHONY: lint-modules
lint-modules: $(GOLANGCI_LINT) ## golangci-lint in the tree's other modules, some of which need Kubernetes' sources
	@for m in $(MODULES); do (cd $$m && $(GOLANGCI_LINT) run); done

# once prints what is built only once, and about how long it takes on 2 cores without a build cache.
once = echo "building $(1), once: about $(2)"

$(GOLANGCI_LINT):
	@$(call once,golangci-lint $(GOLANGCI),3 minutes)
	@GOFLAGS= GOBIN=$(CACHE)/tools/build go install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI)
	@mv $(CACHE)/tools/build/golangci-lint $@

$(CACHE)/tools/actionlint-$(ACTIONLINT):
	@$(call once,actionlint $(ACTIONLINT),15 seconds)
	@GOFLAGS= GOBIN=$(CACHE)/tools/build go install github.com/rhysd/actionlint/cmd/actionlint@$(ACTIONLINT)
	@mv $(CACHE)/tools/build/actionlint $@

# remove_all_sd leaves out the clients of clouds, which the tests of rules do not need.
PROMTOOL := $(CACHE)/tools/promtool-$(shell awk '$$1 == "github.com/prometheus/prometheus" {print $$2}' integration/monitoring/go.mod 2>/dev/null)

.PHONY: monitoring
monitoring: $(PROMTOOL) ## test the dashboard and the alerting rules with promtool, built once into the cache
	@PROMTOOL='$(PROMTOOL)' go test -C integration/monitoring -buildvcs=false -count=1 $(ARGS) ./...

$(PROMTOOL):
	@$(call once,$(notdir $@),3 minutes)
	@mkdir -p '$(CACHE)/tools'
	@CGO_ENABLED=0 go build -C integration/monitoring -trimpath -buildvcs=false -ldflags '-s -w' -tags remove_all_sd -o '$@.new' \
	  github.com/prometheus/prometheus/cmd/promtool
	@mv '$@.new' '$@'

.PHONY: fmt
fmt: ## format the source
	@gofmt -l -w $$(git ls-files '*.go')

.PHONY: reference
reference: ## build the reference plugins from integration/reference/go.mod into build/reference
	@scripts/reference.sh

.PHONY: bench
bench: build reference ## measure side by side with the reference plugins
	@go run ./integration/bench -plugins $(BIN) -reference build/reference $(ARGS)

.PHONY: faults
faults: ## bring about every fault at every point; ARGS='-run TestFaultNetns'
	@FAULTS=all go test -v -count=1 -timeout 4h $(or $(ARGS),-skip '^Test(Soak$$|Measured)') ./integration/faults ./integration/plugins ./integration/docs

.PHONY: soak
soak: build ## random verbs, kills, flushes and losses on a node with 208 pods for 12 minutes; ARGS='-seed 123 -steps 500', ARGS='-for 2h'
	@PODLACE_BIN=$(CURDIR)/$(BIN) go test -v -count=1 -timeout 0 -run '^TestSoak$$' ./integration/faults -args -pods 208 -seed $$RANDOM$$RANDOM -for 12m $(ARGS)

.PHONY: upgrade
upgrade: build ## upgrade a node with 20 pods from the programs of the last tag, or of the day before, to this tree's, and back; FROM=commit
	@FROM='$(FROM)' scripts/upgrade-test.sh '$(CACHE)/upgrade' $(ARGS)

.PHONY: mutants
mutants: ## change pkg/ in wrong ways and compare how many changes the tests notice with rates.tsv; ARGS='-packages ./pkg/ports -update'
	@go run ./integration/mutants $(ARGS)

.PHONY: sim
sim: ## simulate which VFs pods get, by the kubelet and by each policy; ARGS='-seeds 20 -pods 20000'
	@go run ./integration/sim $(ARGS)

.PHONY: sim-dra
sim-dra: ## simulate DRA in a cluster of 5,000 nodes with the scheduler's own allocator; ARGS='-large -rounds 1000'
	@go run -C integration/dra-sim . $(ARGS)

.PHONY: picture
picture: build ## draw the pictures of docs/: diagrams (needs Graphviz) and stills of a terminal from real runs; ARGS=diagrams, ARGS=stills
	@scripts/pictures.sh $(ARGS)

# The site has no files of other projects, and needs no server: open build/site/index.html.
.PHONY: site
site: $(CACHE)/tools/hugo-$(HUGO) ## write the documents as a static site into build/site, and check its links and pictures
	@rm -rf build/site
	@$< --config docs/site/hugo.toml --destination build/site --noBuildLock --quiet --panicOnWarning
	@SITE='$(CURDIR)/build/site' go test -count=1 -run '^TestSite$$' ./integration/docs

CHROMIUM ?= $(firstword $(foreach p,chromium-headless-shell chromium google-chrome,$(shell command -v $p)))

.PHONY: site-check
site-check: site ## look at each page of the site in a headless browser, as wide as a phone, a tablet and a desk, and search (needs Chromium)
	@test -n '$(CHROMIUM)' || { echo "site-check: no Chromium in PATH: install chromium-headless-shell, or set CHROMIUM" >&2; exit 1; }
	@SITE='$(CURDIR)/build/site' CHROMIUM='$(CHROMIUM)' go test -count=1 -run '^TestSiteInBrowser$$' ./integration/docs

$(CACHE)/tools/hugo-$(HUGO):
	@$(call once,hugo $(HUGO),3 minutes)
	@CGO_ENABLED=0 GOFLAGS= GOBIN=$(CACHE)/tools/build go install github.com/gohugoio/hugo@$(HUGO)
	@mv $(CACHE)/tools/build/hugo $@

.PHONY: cover
cover: build ## run the tests and show the coverage of each package
	@scripts/test.sh -cover

.PHONY: ci
ci: ## what .ci/run runs: installs what it needs, then every check, as root and as an ordinary user
	@scripts/ci.sh

# What is too long for each commit, roughly by what it finds. TARGETS='vm e2e' chooses.
TARGETS := lint-modules user race pod faults soak vm kernels node apiserver dra crio neighbours cluster e2e upgrade bench monitoring release-check site-check fuzz mutants

.PHONY: nightly
nightly: ## run everything long, and print one table with results and times; TARGETS='vm e2e' (needs root and Debian)
	@CACHE='$(CACHE)' scripts/nightly.sh $(TARGETS)

.PHONY: nightly-list
nightly-list: # the public workflow starts a job for each
	@echo $(TARGETS)

.PHONY: user
user: ## run `make test` and `make demo` as an ordinary user with empty caches (needs root)
	@scripts/as-user.sh 'make test && make demo'

# The folders of an installation and its receipt, which has the path that 'make uninstall' must get again.
INSTALLATION = DESTDIR='$(DESTDIR)' RECEIPT='$(DESTDIR)$(PREFIX)/share/podlace/receipt' DRYRUN='$(DRYRUN)'

.PHONY: install
install: ## install what `make build` made: plugins into /opt/cni/bin, tools into /usr/local/bin (DESTDIR, CNI_BIN_DIR, PREFIX, DRYRUN=1)
	@DRYRUN='$(DRYRUN)' scripts/install-check.sh $(BIN) '$(DESTDIR)$(CNI_BIN_DIR)' '$(DESTDIR)$(PREFIX)/bin' '$(DESTDIR)$(PREFIX)/share' -- \
	  $(CNI_PLUGINS) $(TOOLS)
	@$(INSTALLATION) scripts/install.sh $(BIN) '$(DESTDIR)$(CNI_BIN_DIR)' $(CNI_PLUGINS) -- $(BIN) '$(DESTDIR)$(PREFIX)/bin' $(TOOLS)

.PHONY: uninstall
uninstall: ## remove what `make install` installed, and put back what it replaced (DESTDIR, PREFIX, DRYRUN=1)
	@$(INSTALLATION) scripts/uninstall.sh

.PHONY: release
release: $(CACHE)/tools/cyclonedx-gomod-$(CYCLONEDX) $(CACHE)/tools/nfpm-$(NFPM) ## make archives, debs and rpms for amd64 and arm64, with SBOMs and licenses, in build/release
	@VERSION='$(VERSION)' EPOCH='$(EPOCH)' LDFLAGS='$(LDFLAGS)' CNI_PLUGINS='$(CNI_PLUGINS)' TOOLS='$(TOOLS)' SBOM='$<' NFPM='$(word 2,$^)' \
	  scripts/release.sh build/release amd64 arm64

# The second build runs in another folder, from a tarball of the commit without git.
.PHONY: release-check
release-check: ## make the archives of the commit twice, compare them, and test them (needs a committed tree)
	@rm -rf build/release build/tarball
	@mkdir -p build/tarball
	@git archive HEAD | tar -x -C build/tarball
	@$(MAKE) --no-print-directory -C build/tarball release
	@$(MAKE) --no-print-directory release
	@RELEASE='$(CURDIR)/build/release' REBUILT='$(CURDIR)/build/tarball/build/release' go test -count=1 -v ./integration/release

$(CACHE)/tools/cyclonedx-gomod-$(CYCLONEDX):
	@$(call once,cyclonedx-gomod $(CYCLONEDX),15 seconds)
	@GOFLAGS= GOBIN=$(CACHE)/tools/build go install github.com/CycloneDX/cyclonedx-gomod/cmd/cyclonedx-gomod@$(CYCLONEDX)
	@mv $(CACHE)/tools/build/cyclonedx-gomod $@

$(CACHE)/tools/nfpm-$(NFPM):
	@$(call once,nfpm $(NFPM),1 minute)
	@GOFLAGS= GOBIN=$(CACHE)/tools/build go install github.com/goreleaser/nfpm/v2/cmd/nfpm@$(NFPM)
	@mv $(CACHE)/tools/build/nfpm $@

.PHONY: clean
clean: ## remove what was built
	@rm -rf $(BIN) build

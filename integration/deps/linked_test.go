// SPDX-License-Identifier: Apache-2.0

package deps

import (
	"bytes"
	"debug/elf"
	"debug/gosym"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
)

// forbiddenPackages must not be part of a CNI binary, nor may packages in their subfolders.
func forbiddenPackages() []string {
	return []string{"k8s.io", "sigs.k8s.io", "net/http", "google.golang.org", "go.opentelemetry.io", "testing", "crypto/tls",
		"github.com/spf13",
		"github.com/containernetworking/cni/pkg/invoke", "github.com/containernetworking/cni/libcni", module + "pkg/daemon", module + "pkg/agent",
		module + "pkg/cli", module + "integration"}
}

// binaryFolder returns PODLACE_BIN, or a new folder with binaries that it builds with the release's flags.
func binaryFolder(t *testing.T) string {
	t.Helper()
	if dir := os.Getenv("PODLACE_BIN"); dir != "" {
		return dir
	}
	// Without the Go compiler or a module, for example offline, the tests are skipped.
	if out, err := goTool("list", "-deps", "./plugins/...").CombinedOutput(); err != nil {
		t.Skipf("SKIPPED: the binaries cannot be built on this machine, and PODLACE_BIN does not name a folder with them: %v\n%s", err, out)
	}
	dir := t.TempDir()
	build := goTool("build", "-trimpath", "-tags=grpcnotrace", "-ldflags=-s -w", "-o", dir+"/", "./plugins/...")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	return dir
}

func goTool(args ...string) *exec.Cmd {
	cmd := exec.Command("go", args...)
	cmd.Dir = "../.."
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOPROXY=off")
	return cmd
}

// linkedPackages returns the packages whose functions a binary contains, from the table that Go uses for tracebacks, because a stripped
// binary still has it.
func linkedPackages(t *testing.T, f *elf.File) []string {
	t.Helper()
	section := f.Section(".gopclntab")
	if section == nil {
		t.Fatal("no .gopclntab")
	}
	data, err := section.Data()
	if err != nil {
		t.Fatal(err)
	}
	table, err := gosym.NewTable(nil, gosym.NewLineTable(data, f.Section(".text").Addr))
	if err != nil {
		t.Fatal(err)
	}
	var packages []string
	for _, fn := range table.Funcs {
		packages = append(packages, packageOf(fn.Name))
	}
	slices.Sort(packages)
	return slices.Compact(packages)
}

// packageOf returns the package of a function such as "example.org/a/b.(*T).Method[...]". Binaries escape dots in the last element of its
// path.
func packageOf(function string) string {
	function, _, _ = strings.Cut(function, "[")
	slash := strings.LastIndex(function, "/")
	if dot := strings.Index(function[slash+1:], "."); dot >= 0 {
		function = function[:slash+1+dot]
	}
	return strings.ReplaceAll(function, "%2e", ".")
}

func TestPackageOf(t *testing.T) {
	for function, want := range map[string]string{
		"main.main": "main", "net/http.(*Client).Do": "net/http", "gopkg.in/yaml%2ev3.Parse": "gopkg.in/yaml.v3", "a/b.F[go.shape.int]": "a/b",
		"go:buildid": "go:buildid", "type:.eq.net/netip.Addr": "type:.eq.net/netip",
	} {
		if got := packageOf(function); got != want {
			t.Errorf("%s: %s, want %s", function, got, want)
		}
	}
}

func TestBinaries(t *testing.T) {
	dir := binaryFolder(t)
	for name, budget := range budgets(t, "bytes") {
		if slices.Contains(grpcPrograms(), name) {
			continue
		}
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(dir, name)
			f, err := elf.Open(file)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			checkLinked(t, f)
			checkPlain(t, f, file)
			checkSize(t, f, file, budget)
		})
	}
}

// grpcPrograms link the Kubernetes client, or gRPC, which makes most of the helper's size.
func grpcPrograms() []string { return []string{"sriov-device-plugin", "podlace-podresources"} }

func TestDaemonSize(t *testing.T) {
	dir := binaryFolder(t)
	for _, name := range grpcPrograms() {
		path := filepath.Join(dir, name)
		f, err := elf.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		checkSize(t, f, path, budgets(t, "bytes")[name])
	}
}

func checkLinked(t *testing.T, f *elf.File) {
	t.Helper()
	packages := linkedPackages(t, f)
	if !slices.Contains(packages, module+"pkg/plugin") {
		t.Fatalf("the frame is not among the packages: %q", packages)
	}
	for _, p := range packages {
		for _, bad := range forbiddenPackages() {
			if isBelow(p, bad) {
				t.Errorf("%s is linked, which forbiddenPackages forbids: %s shows the imports to remove", p,
					"go list -f '{{.ImportPath}}: {{.Imports}}' -deps ./"+path.Join("plugins", path.Base(t.Name())))
			}
		}
	}
}

// checkPlain checks that a binary needs no shared library and has no code that injects faults.
func checkPlain(t *testing.T, f *elf.File, path string) {
	t.Helper()
	if slices.ContainsFunc(f.Progs, func(p *elf.Prog) bool { return p.Type == elf.PT_INTERP }) {
		t.Error("the binary needs shared libraries; run: make build, which sets CGO_ENABLED=0")
	}
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(data, []byte("injected fault")) {
		t.Error("the binary injects faults; run: make build, which does not set the build tag podlace_fault")
	}
}

func checkSize(t *testing.T, f *elf.File, path string, budget int64) {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d bytes, budget %d", info.Size(), budget)
	if runtime.GOARCH == "amd64" && f.Section(".symtab") == nil && info.Size() > budget {
		t.Errorf("%s has %d bytes, %d over the budget: remove newly linked packages, or set its budget in integration/deps/linked_test.go to %d and "+
			"give the reason in docs/dev/DECISIONS.md", filepath.Base(path), info.Size(), info.Size()-budget, info.Size()*11/10)
	}
}

// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"bytes"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestFlags checks that the flags in manifests of sriov-network-device-plugin are accepted, and that an error names the wrong flag.
func TestFlags(t *testing.T) {
	t.Setenv("NODE_NAME", "node-7")
	dir := t.TempDir()
	var stderr bytes.Buffer
	o, level, err := parseFlags([]string{"--log-dir=sriovdp", "--log-level=10", "--resource-prefix=example.com", "-config-file", "/x",
		"--use-cdi", "--kubelet-dir", dir, "-v=10", "-logtostderr=true", "--alsologtostderr", "-stderrthreshold", "INFO"}, &stderr)
	if err != nil || level != slog.LevelDebug || o.Prefix != "example.com" || o.ConfigFile != "/x" || !o.UseCDI || o.Host != "node-7" ||
		o.Pods != filepath.Join(dir, "pod-resources") || o.Kubelet != (kubeletDirs{Plugins: defaultPlugins}) {
		t.Errorf("%+v, %s, %v", o, level, err)
	}
	registry := filepath.Join(dir, "plugins_registry")
	if err := os.Mkdir(registry, 0o755); err != nil {
		t.Fatal(err)
	}
	for how, want := range map[string]string{"auto": registry, "registry": registry, "classic": ""} {
		if o, _, err := parseFlags([]string{"--kubelet-dir", dir, "--registration", how}, &stderr); err != nil || o.Kubelet.Registry != want {
			t.Errorf("%s: %q, %v", how, o.Kubelet.Registry, err)
		}
	}
	for says, args := range map[string][]string{"registration": {"--registration", "magic"}, "log-level": {"--log-level", "loud"},
		"poll 1ms":            {"--poll", "1ms"},
		"unexpected argument": {"now"}, "flag provided but not defined": {"--speed"}} {
		stderr.Reset()
		if status := Main(args, &stderr); status != 2 || !strings.Contains(stderr.String(), says) {
			t.Errorf("%q: status %d, %s", args, status, &stderr)
		}
	}
	stderr.Reset()
	if status := Main([]string{"--config-file", filepath.Join(dir, "none")}, &stderr); status != 1 ||
		!strings.Contains(stderr.String(), "no such file") {
		t.Errorf("status %d, %s", status, &stderr)
	}
	if status := Main([]string{"--help"}, &stderr); status != 0 {
		t.Errorf("--help: status %d", status)
	}
}

func TestDocumentedFlags(t *testing.T) {
	text, err := os.ReadFile("../../../plugins/sriov-device-plugin/README.md")
	if err != nil {
		t.Fatal(err)
	}
	flags := new(commandLine).defineFlags(io.Discard)
	named := regexp.MustCompile("`--([a-z-]+)").FindAllStringSubmatch(string(text), -1)
	for _, m := range named {
		if m[1] != "help" && flags.Lookup(m[1]) == nil {
			t.Errorf("plugins/sriov-device-plugin/README.md: the daemon has no flag --%s", m[1])
		}
	}
	if len(named) < 3 {
		t.Errorf("plugins/sriov-device-plugin/README.md names %d flags", len(named))
	}
}

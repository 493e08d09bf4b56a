// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/harness"
)

// systemdUnit maps sections and keys of a unit to their values.
type systemdUnit map[string]map[string][]string

// readUnit parses the syntax of systemd.unit(5) that these units use, and fails for any other line.
func readUnit(t *testing.T, path string) systemdUnit {
	t.Helper()
	u, section := systemdUnit{}, ""
	for n, line := range strings.Split(readFile(t, path), "\n") {
		switch key, value, ok := strings.Cut(line, "="); {
		case line == "" || line[0] == '#':
		case line[0] == '[' && strings.HasSuffix(line, "]"):
			section = strings.Trim(line, "[]")
			u[section] = map[string][]string{}
		case !ok || section == "" || value == "" && key != "CapabilityBoundingSet" || !slices.Contains(unitKeys()[section], key):
			t.Errorf("%s:%d: %q: this test knows no such key of section %q: correct it, or add it to unitKeys in integration/docs/units_test.go", path,
				n+1, line, section)
		default:
			u[section][key] = append(u[section][key], value)
		}
	}
	return u
}

func unitKeys() map[string][]string {
	return map[string][]string{
		"Unit": {"Description", "Documentation", "After", "Before", "PartOf", "ReloadPropagatedFrom", "StartLimitIntervalSec"},
		"Service": {"Type", "ExecStart", "ExecReload", "RemainAfterExit", "SuccessExitStatus", "Restart", "RestartSec", "CapabilityBoundingSet",
			"NoNewPrivileges",
			"ProtectSystem", "ProtectHome", "PrivateTmp", "ProtectClock", "ProtectControlGroups", "ProtectKernelLogs", "ProtectKernelModules",
			"RestrictAddressFamilies", "RestrictNamespaces", "RestrictRealtime", "RestrictSUIDSGID", "LockPersonality", "MemoryDenyWriteExecute",
			"SystemCallArchitectures", "ProtectHostname", "KeyringMode", "Environment", "MemoryMax", "TasksMax", "LimitNOFILE", "EnvironmentFile"},
		"Timer":   {"OnBootSec", "OnUnitInactiveSec", "RandomizedDelaySec"},
		"Install": {"WantedBy"},
	}
}

// Each unit must be well-formed and start an installed program with flags that it has. Each timer must have a service.
func TestUnits(t *testing.T) {
	services, timers := units(t, "*.service"), units(t, "*.timer")
	if len(services) == 0 || len(timers) == 0 {
		t.Fatal("there are none")
	}
	for _, name := range services {
		service := readUnit(t, "conf/"+name)["Service"]
		command := strings.Fields(strings.Join(service["ExecStart"], " "))
		program, says := "podlace", "exit status"
		if len(service["Type"]) == 0 {
			program, says = "sriov-device-plugin", "-config-file"
			switch name {
			case "podlace-node.service":
				program, says = "podlace-node", "--kubeconfig"
			case "podlace-reload.service":
				program, says = "podlace", "--watch"
			}
		} else if slices.Index(service["Type"], "oneshot") != 0 {
			t.Errorf("conf/%s: Type=%q: write Type=oneshot, or no Type for a daemon", name, service["Type"])
		}
		if len(command) < 2 || command[0] != "/usr/local/bin/"+program {
			t.Errorf("conf/%s: ExecStart=%q: begin it with /usr/local/bin/%s", name, command, program)
			continue
		}
		out, err := exec.Command(filepath.Join(harness.BinDir(), program), append(command[1:], "--help")...).CombinedOutput()
		if err != nil || !strings.Contains(string(out), says) {
			t.Errorf("conf/%s: %s refuses the flags of ExecStart=%q: correct them: %v\n%s", name, program, command, err, out)
		}
	}
	for _, name := range timers {
		timer := readUnit(t, "conf/"+name)
		if !slices.Contains(services, strings.TrimSuffix(name, ".timer")+".service") {
			t.Errorf("conf/%s has no service: add conf/%s.service", name, strings.TrimSuffix(name, ".timer"))
		}
		if !slices.Equal(timer["Install"]["WantedBy"], []string{"timers.target"}) {
			t.Errorf("conf/%s: WantedBy=%q: write WantedBy=timers.target", name, timer["Install"]["WantedBy"])
		}
		for key, values := range timer["Timer"] {
			if _, err := time.ParseDuration(strings.Replace(values[0], "min", "m", 1)); err != nil || len(values) != 1 {
				t.Errorf("conf/%s: %s=%q: write one duration, such as 5min: %v", name, key, values, err)
			}
		}
	}
	t.Run("systemd-analyze", func(t *testing.T) { verifyUnits(t, append(services, timers...)) })
}

// The command in conf/README.md installs the plugins into the folder from which podlace-node.service takes them.
func TestAgentUnitFindsPlugins(t *testing.T) {
	folder := regexp.MustCompile(`--plugins (\S+)`).FindStringSubmatch(readFile(t, "conf/podlace-node.service"))
	command := regexp.MustCompile("`make install (CNI_BIN_DIR=[^`]+)`").FindStringSubmatch(readFile(t, "conf/README.md"))
	if folder == nil || command == nil {
		t.Fatalf("the unit has the plugins in %q, and conf/README.md the command %q", folder, command)
	}
	c := newCheckout(t)
	if out, err := c.make("install", command[1]); err != nil {
		t.Fatalf("%s: %v\n%s", command[0], err, out)
	}
	for _, name := range makeVariable(t, "CNI_PLUGINS") {
		if _, err := os.Stat(filepath.Join(c.into, folder[1], name)); err != nil {
			t.Errorf("%s does not install it where podlace-node.service takes it from: %v", command[0], err)
		}
	}
}

func units(t *testing.T, pattern string) (names []string) {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(treeRoot, "conf", pattern))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range paths {
		names = append(names, filepath.Base(path))
	}
	return names
}

// verifyUnits runs `systemd-analyze verify` with the built binaries, if it is installed.
func verifyUnits(t *testing.T, names []string) {
	t.Helper()
	tool, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Skip("SKIPPED: no systemd-analyze")
	}
	dir := t.TempDir()
	args := []string{"verify", "--man=no"}
	for _, name := range names {
		bin, err := filepath.Abs(harness.BinDir())
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(strings.ReplaceAll(readFile(t, "conf/"+name), "/usr/local/bin", bin)), 0o644); err != nil {
			t.Fatal(err)
		}
		args = append(args, path)
	}
	if out, err := exec.Command(tool, args...).CombinedOutput(); err != nil || strings.Contains(string(out), dir) {
		t.Errorf("%v\n%s", err, out)
	}
}

// SPDX-License-Identifier: Apache-2.0

package release

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// The file with the completion for zsh, which deb and rpm install in different folders.
const (
	debZsh = "/usr/share/zsh/vendor-completions/_podlace"
	rpmZsh = "/usr/share/zsh/site-functions/_podlace"
)

// packageFiles lists the files expected in a package, without man pages of subcommands and example configurations.
func packageFiles(zsh string) []string {
	files := []string{
		"/usr/share/bash-completion/completions/podlace", zsh,
		"/usr/share/fish/vendor_completions.d/podlace.fish",
		"/usr/share/doc/podlace/THIRD-PARTY-LICENSES", "/usr/share/doc/podlace/copyright", "/usr/share/man/man1/podlace.1",
	}
	for _, name := range []string{"bridge", "host-local", "loopback", "portmap", "bandwidth", "sriov", "podlace-pod", "podlace-podresources"} {
		files = append(files, "/usr/libexec/podlace/cni/"+name, "/usr/share/doc/podlace/sbom/"+name+".cdx.json")
	}
	for _, name := range []string{"podlace", "podlace-node", "sriov-device-plugin"} {
		files = append(files, "/usr/bin/"+name, "/usr/share/doc/podlace/sbom/"+name+".cdx.json")
	}
	for _, name := range []string{"podlace-gc.service", "podlace-gc.timer", "podlace-node.service", "podlace-reload.service",
		"sriov-device-plugin.service"} {
		files = append(files, "/usr/lib/systemd/system/"+name)
	}
	slices.Sort(files)
	return files
}

// listedFiles returns the files in a package's listing, without man pages of subcommands and example configurations.
func listedFiles(lines string, isFile func(string) bool) (files []string) {
	more := regexp.MustCompile(`^/usr/share/(man/man1/podlace-|doc/podlace/examples/)`)
	for line := range strings.Lines(lines) {
		path := strings.TrimPrefix(strings.TrimSpace(line[strings.LastIndex(" "+line, " "):]), ".")
		if isFile(line) && !more.MatchString(path) {
			files = append(files, path)
		}
	}
	slices.Sort(files)
	return files
}

func needs(t *testing.T, program string) {
	t.Helper()
	if _, err := exec.LookPath(program); err != nil {
		t.Skipf("SKIPPED: %s is missing: %v", program, err)
	}
}

// The packages of both architectures contain exactly the listed files.
func TestPackageFiles(t *testing.T) {
	for _, arch := range []string{"amd64", "arm64"} {
		t.Run("deb "+arch, func(t *testing.T) {
			needs(t, "dpkg-deb")
			deb := glob(t, filepath.Join(folderFrom(t, "RELEASE"), "*"+arch+".deb"))[0]
			got := listedFiles(run(t, "", "dpkg-deb", "-c", deb), func(line string) bool { return line[0] == '-' })
			if diff := cmp.Diff(packageFiles(debZsh), got); diff != "" {
				t.Errorf("the package has other files: change scripts/package/nfpm.yaml, or packageFiles in this test\n(-packageFiles +package)\n%s", diff)
			}
		})
		t.Run("rpm "+arch, func(t *testing.T) {
			needs(t, "rpm")
			rpm := glob(t, filepath.Join(folderFrom(t, "RELEASE"), "*"+arch+".rpm"))[0]
			got := listedFiles(run(t, "", "rpm", "-qlp", "--dbpath", t.TempDir(), rpm), func(line string) bool { return line[0] == '/' })
			if diff := cmp.Diff(packageFiles(rpmZsh), got); diff != "" {
				t.Errorf("the package has other files: change scripts/package/nfpm.yaml, or packageFiles in this test\n(-packageFiles +package)\n%s", diff)
			}
		})
	}
}

// The rpm has the same scripts as the deb, which TestDebInstalls runs.
func TestRPMScripts(t *testing.T) {
	needs(t, "rpm")
	rpm := glob(t, filepath.Join(folderFrom(t, "RELEASE"), "*amd64.rpm"))[0]
	got := run(t, "", "rpm", "-qp", "--scripts", "--dbpath", t.TempDir(), rpm)
	for _, name := range []string{"postinstall", "preremove"} {
		text, err := os.ReadFile("../../scripts/package/" + name + ".sh")
		if err != nil || !strings.Contains(got, strings.TrimSpace(string(text))) {
			t.Errorf("%s.sh is missing: %v\n%s", name, err, got)
		}
	}
}

// fakeSystemctl puts a program in place of systemctl, for a root folder in which systemd seems to run. It returns what reads its calls.
func fakeSystemctl(t *testing.T, root string) (calls func() string) {
	t.Helper()
	bin := t.TempDir()
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	text := "#!/bin/sh\necho \"$*\" >>" + bin + "/calls\n"
	if err := errors.Join(os.WriteFile(bin+"/systemctl", []byte(text), 0o755), os.MkdirAll(root+"/run/systemd/system", 0o755)); err != nil {
		t.Fatal(err)
	}
	return func() string {
		t.Helper()
		text, err := os.ReadFile(bin + "/calls")
		if err := errors.Join(err, os.Remove(bin+"/calls")); err != nil {
			t.Error(err)
		}
		return string(text)
	}
}

// dpkg installs the package into a root folder. Each unit starts an installed program, installing restarts daemons that run, and a purge
// stops them and leaves no file.
func TestDebInstalls(t *testing.T) {
	needs(t, "dpkg")
	deb, root := glob(t, filepath.Join(folderFrom(t, "RELEASE"), "*amd64.deb"))[0], t.TempDir()
	dpkg := func(args ...string) string {
		return run(t, "", append([]string{"dpkg", "--root=" + root, "--force-not-root", "--force-depends", "--force-script-chrootless",
			"--log=/dev/null"}, args...)...)
	}
	calls := fakeSystemctl(t, root)
	for _, dir := range []string{"info", "updates", "triggers"} {
		if err := os.MkdirAll(filepath.Join(root, "var/lib/dpkg", dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"status", "available"} {
		if err := os.WriteFile(filepath.Join(root, "var/lib/dpkg", name), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, how := range []string{"new", "upgrade"} {
		dpkg("--install", deb)
		if got := calls(); got != "daemon-reload\ntry-restart podlace-reload.service podlace-node.service\n" {
			t.Errorf("%s: %s", how, got)
		}
	}
	for _, unit := range glob(t, root+"/usr/lib/systemd/system/*.service") {
		text, err := os.ReadFile(unit)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`(?m)(?:^ExecStart=| --plugins )(\S+)`).FindAllStringSubmatch(string(text), -1) {
			if _, err := os.Stat(root + m[1]); err != nil {
				t.Errorf("%s starts %s, which the package lacks", filepath.Base(unit), m[1])
			}
		}
	}
	dpkg("--purge", "podlace")
	if got := calls(); got != "disable --now podlace-reload.service podlace-node.service podlace-gc.timer sriov-device-plugin.service\n" {
		t.Errorf("purge: %s", got)
	}
	err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if err == nil && !strings.HasPrefix(path, root+"/var") && !strings.HasPrefix(root+"/run/systemd/system", path) {
			t.Errorf("the purge left %s", strings.TrimPrefix(path, root))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package pci

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/pcitest"
)

const (
	byKernel = "0000:3b:11.0" // iavf
	byVFIO   = "0000:3b:11.1" // vfio-pci
	byNobody = "0000:3b:11.3"
)

// withFakeKernel returns a sysfs tree with a running fake kernel and without any driver_override.
func withFakeKernel(t *testing.T, k pcitest.Kernel) (sysfs string) {
	t.Helper()
	sysfs = pcitest.Extract(t, "vfio")
	pcitest.Set(t, sysfs, byVFIO, "driver_override", "(null)")
	k.Start(t, sysfs)
	return sysfs
}

// driverState returns the driver of a function and its driver_override, separated by a comma.
func driverState(t *testing.T, sysfs, a string) string {
	t.Helper()
	root, err := os.OpenRoot(sysfs)
	must(t, err)
	defer root.Close()
	c := control{root, address(t, a), devicesFolder + "/" + a}
	driver, err := c.currentDriver()
	must(t, err)
	override, err := c.currentOverride()
	must(t, err)
	return driver + "," + override
}

func TestBind(t *testing.T) {
	sysfs := withFakeKernel(t, pcitest.Kernel{})
	before := mustScan(t, sysfs)
	for _, step := range []struct{ vf, driver string }{
		{byKernel, "vfio-pci"}, {byVFIO, "iavf"}, {byNobody, "vfio-pci"}, {byNobody, "iavf"}, {byKernel, "iavf"},
	} {
		must(t, Bind(t.Context(), sysfs, address(t, step.vf), step.driver))
		if got := driverState(t, sysfs, step.vf); got != step.driver+"," {
			t.Errorf("%s: %s, want %s and no override", step.vf, got, step.driver)
		}
	}
	for _, c := range differences(before, mustScan(t, sysfs)) {
		if c != byKernel && c != byVFIO && c != byNobody {
			t.Errorf("another function: %s", c)
		}
	}
}

// TestBindAgain checks that Bind writes no file if the function already has the driver.
func TestBindAgain(t *testing.T) {
	sysfs := pcitest.Extract(t, "vfio")
	must(t, os.RemoveAll(filepath.Join(sysfs, probeFile)), os.Remove(filepath.Join(pcitest.Folder(t, sysfs, byVFIO), "driver_override")))
	must(t, Bind(t.Context(), sysfs, address(t, byVFIO), "vfio-pci"))
}

// TestBindRefused checks that Bind refuses the impossible before it changes anything.
func TestBindRefused(t *testing.T) {
	sysfs := withFakeKernel(t, pcitest.Kernel{})
	for driver, want := range map[string]string{
		"ixgbevf": "bind 0000:3b:11.0 to ixgbevf: the driver is not loaded: ", "..": "want the name of a driver",
		"vfio-pci/..": "want the name of a driver", "vfio-pci\n": "want the name of a driver",
	} {
		if err := Bind(t.Context(), sysfs, address(t, byKernel), driver); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", driver, err)
		}
	}
	if got := driverState(t, sysfs, byKernel); got != "iavf," {
		t.Errorf("afterwards %s", got)
	}
	for _, a := range []Address{{}, address(t, "0000:ff:00.0")} {
		for _, driver := range []string{"iavf", ""} {
			if err := Bind(t.Context(), sysfs, a, driver); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%s, driver %q: %v", a, driver, err)
			}
		}
	}
}

// failBind calls Bind with a short timeout and returns its error, which the test requires.
func failBind(t *testing.T, sysfs, vf, driver string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second) // the fake kernel may be slow on a busy machine
	defer cancel()
	err := Bind(ctx, sysfs, address(t, vf), driver)
	if err == nil {
		t.Fatalf("%s is bound to %s", vf, driver)
	}
	return err.Error()
}

// TestBindFails checks that Bind goes back to the previous driver if the new one does not accept the function.
func TestBindFails(t *testing.T) {
	sysfs := withFakeKernel(t, pcitest.Kernel{Failing: []string{"vfio-pci"}})
	err := failBind(t, sysfs, byKernel, "vfio-pci")
	if !strings.HasPrefix(err, "bind 0000:3b:11.0 to vfio-pci: wait for vfio-pci, have no driver: ") ||
		!strings.HasSuffix(err, "; it is bound to iavf again") {
		t.Error(err)
	}
	if got := driverState(t, sysfs, byKernel); got != "iavf," {
		t.Errorf("afterwards %s", got)
	}
	if err := failBind(t, sysfs, byNobody, "vfio-pci"); !strings.HasSuffix(err, "; it is bound to no driver again") {
		t.Error(err)
	}
	if got := driverState(t, sysfs, byNobody); got != "," {
		t.Errorf("afterwards %s", got)
	}
}

// TestBindFailsTwice has neither the new nor the previous driver accept the function.
func TestBindFailsTwice(t *testing.T) {
	sysfs := withFakeKernel(t, pcitest.Kernel{Failing: []string{"vfio-pci", "iavf"}})
	if err := failBind(t, sysfs, byKernel, "vfio-pci"); !strings.Contains(err,
		"; and it could not be bound to iavf again: wait for iavf, have no driver: ") {
		t.Error(err)
	}
	if got := driverState(t, sysfs, byKernel); got != "," {
		t.Errorf("afterwards %s", got)
	}
}

// TestBindInUse checks that Bind resets driver_override if the current driver does not release the function.
func TestBindInUse(t *testing.T) {
	sysfs := withFakeKernel(t, pcitest.Kernel{Stuck: []string{"vfio-pci"}})
	if err := failBind(t, sysfs, byVFIO, "iavf"); !strings.Contains(err, "wait for no driver, have vfio-pci: ") ||
		!strings.HasSuffix(err, "; it is bound to vfio-pci again") {
		t.Error(err)
	}
	if got := driverState(t, sysfs, byVFIO); got != "vfio-pci," {
		t.Errorf("afterwards %s", got)
	}
}

// TestBindNoWrite checks that an unwritable file is in the error, and that the function keeps its driver.
func TestBindNoWrite(t *testing.T) {
	for _, file := range []string{"bus/pci/drivers/iavf/unbind", "bus/pci/devices/" + byKernel + "/driver_override"} {
		sysfs := withFakeKernel(t, pcitest.Kernel{})
		path := filepath.Join(sysfs, file)
		must(t, os.Remove(path), os.Mkdir(path, 0o700))
		if err := failBind(t, sysfs, byKernel, "vfio-pci"); !strings.Contains(err, file+": ") && !strings.Contains(err, "is a directory") {
			t.Errorf("%s: %s", file, err)
		}
		root, err := os.OpenRoot(sysfs)
		must(t, err)
		if driver, err := (control{root, address(t, byKernel), devicesFolder + "/" + byKernel}).currentDriver(); driver != "iavf" || err != nil {
			t.Errorf("%s: %s, %v", file, driver, err)
		}
		root.Close()
	}
}

// TestBindOverride checks that Bind restores the driver_override that an administrator has set.
func TestBindOverride(t *testing.T) {
	sysfs := withFakeKernel(t, pcitest.Kernel{})
	pcitest.Set(t, sysfs, byVFIO, "driver_override", "vfio-pci")
	must(t, Bind(t.Context(), sysfs, address(t, byVFIO), "iavf"))
	if got := driverState(t, sysfs, byVFIO); got != "iavf,vfio-pci" {
		t.Error(got)
	}
}

// TestBindHangs checks that Bind returns when its context ends although a write hangs.
func TestBindHangs(t *testing.T) {
	sysfs := pcitest.Extract(t, "vfio")
	path := filepath.Join(sysfs, probeFile)
	must(t, os.Remove(path), syscall.Mkfifo(path, 0o600))
	full, err := syscall.Open(path, syscall.O_RDWR|syscall.O_NONBLOCK, 0)
	must(t, err)
	defer syscall.Close(full)
	for err == nil {
		_, err = syscall.Write(full, make([]byte, 4096))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	root, err := os.OpenRoot(sysfs)
	must(t, err)
	defer root.Close()
	err = control{root, address(t, byKernel), ""}.writeFile(ctx, probeFile, byKernel)
	if !errors.Is(err, context.DeadlineExceeded) ||
		!strings.Contains(err.Error(), `write "0000:3b:11.0" to bus/pci/drivers_probe: the kernel has not finished`) {
		t.Error(err)
	}
	override := devicesFolder + "/" + byKernel + "/driver_override"
	if err := (control{root, address(t, byKernel), ""}).writeFile(ctx, override, "x"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("without time: %v", err)
	}
	time.Sleep(10 * time.Millisecond)
	if got := driverState(t, sysfs, byKernel); got != "iavf," {
		t.Errorf("it was written without time: %s", got)
	}
}

// TestBindNone checks that Bind to no driver unbinds the VF, also when it has none.
func TestBindNone(t *testing.T) {
	sysfs := withFakeKernel(t, pcitest.Kernel{})
	for range 2 {
		must(t, Bind(t.Context(), sysfs, address(t, byKernel), ""))
		if got := driverState(t, sysfs, byKernel); got != "," {
			t.Error(got)
		}
	}
	if d, _ := mustScan(t, sysfs).Device(address(t, byKernel)); d.Driver != "" || len(d.Interfaces) > 0 || d.LinkType != Ether {
		t.Errorf("%+v", d)
	}
}

// TestBindGone checks that currentDriver returns fs.ErrNotExist for a removed function, because "" would mean that it exists without a
// driver.
func TestBindGone(t *testing.T) {
	sysfs := pcitest.Extract(t, "vfio")
	root, err := os.OpenRoot(sysfs)
	must(t, err)
	defer root.Close()
	pcitest.Remove(t, sysfs, byKernel)
	if _, err := (control{root, address(t, byKernel), devicesFolder + "/" + byKernel}).currentDriver(); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
}

// TestBindBackToNone checks restoreFormer where there was no driver: it must unbind the function if a bind succeeds only after the
// deadline.
func TestBindBackToNone(t *testing.T) {
	sysfs := withFakeKernel(t, pcitest.Kernel{})
	root, err := os.OpenRoot(sysfs)
	must(t, err)
	defer root.Close()
	c := control{root, address(t, byKernel), devicesFolder + "/" + byKernel}
	must(t, c.setOverride(t.Context(), "vfio-pci"), c.restoreFormer(t.Context(), "", ""))
	if got := driverState(t, sysfs, byKernel); got != "," {
		t.Error(got)
	}
}

// TestBindVFsOnly checks that Bind and ResetFunction refuse a PF, and any function whose link physfn is invalid, and that all
// keep their drivers.
func TestBindVFsOnly(t *testing.T) {
	const pf = "0000:3b:00.0"
	sysfs := withFakeKernel(t, pcitest.Kernel{})
	for _, physfn := range []string{"-> ../banana", "-> ../" + byKernel, "a file"} {
		pcitest.Set(t, sysfs, byKernel, "physfn", physfn)
		for a, driver := range map[string]string{pf: "ice", byKernel: "iavf"} {
			for name, err := range map[string]error{"Bind": Bind(t.Context(), sysfs, address(t, a), "vfio-pci"),
				"Bind to none":  Bind(t.Context(), sysfs, address(t, a), ""),
				"ResetFunction": ResetFunction(t.Context(), sysfs, address(t, a))} {
				if err == nil || !strings.Contains(err.Error(), "PCI function "+a+" is no VF, its driver stays: ") {
					t.Errorf("%s %s, physfn %s: %v", name, a, physfn, err)
				}
			}
			if got := driverState(t, sysfs, a); got != driver+"," {
				t.Errorf("%s, physfn %s: %s", a, physfn, got)
			}
		}
	}
}

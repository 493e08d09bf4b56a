// SPDX-License-Identifier: Apache-2.0

package pcitest

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// Kernel is a fake kernel for a sysfs tree. It reacts to bind, unbind, drivers_probe, driver_override and sriov_numvfs like the real one,
// but only after the write has returned.
type Kernel struct {
	VFDriver string   // driver of new VFs, or ""
	Failing  []string // drivers whose probe of a function fails
	Stuck    []string // drivers that never release a function
}

// fakeKernel is the state of a running Kernel.
type fakeKernel struct {
	Kernel
	t     testing.TB
	sysfs string
	mu    sync.Mutex
	home  map[string]string // default driver of a function, by address
	ends  []func()
	tasks sync.WaitGroup
}

// Start runs the fake kernel until the test ends.
func (k Kernel) Start(t testing.TB, sysfs string) {
	t.Helper()
	p := &fakeKernel{Kernel: k, t: t, sysfs: sysfs, home: map[string]string{}}
	drivers, err := filepath.Glob(filepath.Join(sysfs, "bus/pci/drivers/*"))
	must(t, err)
	for _, d := range drivers {
		p.serveFile(filepath.Join(d, "unbind"), func(address string) error { return p.unbind(address, filepath.Base(d)) })
		p.serveFile(filepath.Join(d, "bind"), func(address string) error { return p.probeDriver(address, filepath.Base(d)) })
	}
	p.serveFile(filepath.Join(sysfs, "bus/pci/drivers_probe"), func(address string) error { return p.probeDriver(address, "") })
	devices, err := filepath.Glob(filepath.Join(sysfs, "bus/pci/devices/*"))
	must(t, err)
	for _, d := range devices {
		p.home[filepath.Base(d)] = driverOf(d)
	}
	stop := make(chan struct{})
	p.ends = append(p.ends, func() { close(stop) })
	p.tasks.Go(func() { p.resizeVFs(stop) })
	t.Cleanup(func() {
		for _, end := range p.ends {
			end()
		}
		p.tasks.Wait()
	})
}

func driverOf(folder string) string {
	target, err := os.Readlink(filepath.Join(folder, "driver"))
	if err != nil {
		return ""
	}
	return filepath.Base(target)
}

// serveFile replaces a file by a FIFO, and calls f for each line that is written to the FIFO.
func (p *fakeKernel) serveFile(path string, f func(line string) error) {
	p.t.Helper()
	must(p.t, os.RemoveAll(path))
	must(p.t, syscall.Mkfifo(path, 0o600))
	fifo, err := os.OpenFile(path, os.O_RDWR, 0)
	must(p.t, err)
	p.ends = append(p.ends, func() { fifo.Close() })
	p.tasks.Go(func() {
		for lines := bufio.NewScanner(fifo); lines.Scan(); {
			p.mu.Lock()
			err := f(lines.Text())
			p.mu.Unlock()
			if err != nil {
				p.t.Errorf("write of %q to %s: %v", lines.Text(), path, err)
			}
		}
	})
}

func (p *fakeKernel) unbind(address, driver string) error {
	if slices.Contains(p.Stuck, driver) {
		return nil
	}
	return unbindDriver(filepath.Join(p.sysfs, "bus/pci/devices", address), driver)
}

// probeDriver binds a PCI function to the driver in driver_override or to its default driver, but if driver is not "", only to this one. It
// is no error if no driver accepts the function.
func (p *fakeKernel) probeDriver(address, driver string) error {
	folder, err := filepath.EvalSymlinks(filepath.Join(p.sysfs, "bus/pci/devices", address))
	if err != nil {
		return err
	}
	text, err := os.ReadFile(filepath.Join(folder, "driver_override"))
	if err != nil {
		return err
	}
	wanted := strings.TrimSpace(string(text))
	if wanted == "" || wanted == "(null)" {
		wanted = p.home[address]
	}
	_, err = os.Stat(filepath.Join(p.sysfs, "bus/pci/drivers", wanted))
	if err != nil || driver != "" && driver != wanted || driverOf(folder) != "" || slices.Contains(p.Failing, wanted) {
		return nil
	}
	return bindDriver(p.sysfs, folder, wanted)
}

// resizeVFs keeps creating and removing VFs until each PF has as many as its sriov_numvfs.
func (p *fakeKernel) resizeVFs(stop <-chan struct{}) {
	for {
		select {
		case <-stop:
			return
		case <-time.After(time.Millisecond):
		}
		counts, _ := filepath.Glob(filepath.Join(p.sysfs, "bus/pci/devices/*/sriov_numvfs"))
		for _, c := range counts {
			text, _ := os.ReadFile(c)
			n, err := strconv.Atoi(strings.TrimSpace(string(text)))
			if err != nil {
				continue // it is being written
			}
			p.mu.Lock()
			if err := p.setNumVFs(filepath.Dir(c), n); err != nil && !errors.Is(err, fs.ErrNotExist) {
				p.t.Errorf("%d VFs: %v", n, err)
			}
			p.mu.Unlock()
		}
	}
}

func (p *fakeKernel) setNumVFs(pf string, n int) error {
	pf, err := filepath.EvalSymlinks(pf)
	if err != nil {
		return err
	}
	links, _ := filepath.Glob(filepath.Join(pf, "virtfn*"))
	if n == len(links) {
		return nil
	}
	if n == 0 {
		return removeVFs(p.sysfs, pf)
	}
	if len(links) > 0 {
		return fmt.Errorf("it has %d, which would be EBUSY", len(links))
	}
	for v := range n {
		groups, err := os.ReadDir(filepath.Join(p.sysfs, "kernel/iommu_groups"))
		if err != nil {
			return err
		}
		vf, err := addVF(p.sysfs, pf, v, len(groups), p.VFDriver)
		if err != nil {
			return err
		}
		p.home[filepath.Base(vf)] = p.VFDriver
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/poddevices"
	"github.com/podlace/podlace/pkg/sriov"
)

const sriovResetHelp = `Reset a VF that no pod has to the state of a new one: restore the settings that its
journal has saved, set the PF's defaults for it, and rebind its driver. With
--function the card also resets the function while no driver is bound: with some
drivers a reset of a bound function hangs.

The command refuses a VF that is in use by a pod, by the kubelet's allocations, or
by the node, and while the device plugin does not answer also one with a driver such as
vfio-pci. Without --yes it changes nothing.`

// resetPatience is how long 'podlace sriov reset' waits for the kernel to reset a PCI function. Its child process may wait longer.
const resetPatience = 15 * time.Second

type resetFlags struct {
	sysfs, socket string
	function, yes bool
}

func newSRIOVReset() *cobra.Command {
	var f resetFlags
	cmd := &cobra.Command{Use: "reset DEVICE", Short: "Reset a VF that no pod has to the state of a new one", Long: sriovResetHelp,
		Example: "  podlace sriov reset 0000:3b:02.1\n  podlace sriov reset 0000:3b:02.1 --function --yes",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			return f.reset(cmd.Context(), args[0], cmd.OutOrStdout(), cmd.ErrOrStderr())
		}}
	cmd.Flags().StringVar(&f.sysfs, "sysfs", pci.Sysfs, "where sysfs is mounted")
	cmd.Flags().StringVar(&f.socket, "socket", poddevices.Socket, "where the device plugin answers")
	cmd.Flags().BoolVar(&f.function, "function", false, "also reset the PCI function")
	cmd.Flags().BoolVar(&f.yes, "yes", false, "do it")
	return cmd
}

// newSRIOVResetFunction returns a hidden command that resets one PCI function. "reset" runs it as a child process, because it may hang in
// the kernel.
func newSRIOVResetFunction() *cobra.Command {
	return &cobra.Command{Use: "reset-function SYSFS DEVICE", Hidden: true, Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			a, err := pci.ParseAddress(args[1])
			if err != nil {
				return err
			}
			return pci.ResetFunction(cmd.Context(), args[0], a)
		}}
}

func (f resetFlags) reset(ctx context.Context, device string, stdout, stderr io.Writer) error {
	a, err := pci.ParseAddress(device)
	if err != nil {
		return err
	}
	if err := needRoot(); err != nil {
		return err
	}
	if err := f.checkFree(ctx, a); err != nil {
		return err
	}
	o := sriov.ResetOptions{Sysfs: f.sysfs, Claims: claim.Folder, Address: a, Act: f.yes, Out: stdout,
		Log: slog.New(slog.NewTextHandler(stderr, nil))}
	if f.function {
		o.Function = func() error { return f.resetFunction(ctx, a) }
	}
	if err := sriov.Reset(o); err != nil {
		if hint := plugin.Hint(err); hint != "" {
			return fmt.Errorf("%w (%s)", err, hint)
		}
		return err
	}
	fmt.Fprintln(stdout, map[bool]string{true: "Done.", false: "Nothing was changed. --yes does it."}[f.yes])
	return nil
}

// checkFree returns an error if the kubelet has allocated the VF, or if the device plugin does not answer and the VF has a user space
// driver: only the kubelet then knows whether a pod uses it.
func (f resetFlags) checkFree(ctx context.Context, a pci.Address) error {
	answer, err := askPlugin(ctx, f.socket, poddevices.Question{})
	for _, d := range answer.Devices {
		if d.ID == a.String() {
			return fmt.Errorf("VF %s is in use: %s is allocated to pod %s", a, plainText(d.Resource), plainText(d.Namespace+"/"+d.Pod))
		}
	}
	if err == nil {
		return nil
	}
	d, _, readErr := pci.Read(f.sysfs, a)
	if readErr == nil && pci.IsUserspace(d.Driver) {
		return fmt.Errorf("VF %s has the user space driver %s, and the device plugin did not say whether a pod has it: %w", a, d.Driver, err)
	}
	return readErr
}

func (f resetFlags) resetFunction(ctx context.Context, a pci.Address) error {
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	var said bytes.Buffer
	cmd := exec.Command(exe, "sriov", "reset-function", f.sysfs, a.String())
	cmd.Stderr = &said
	if err := cmd.Start(); err != nil {
		return err
	}
	done := make(chan error, 1)
	go func() { done <- cmd.Wait() }()
	select {
	case err := <-done:
		if err != nil {
			return fmt.Errorf("%w: %s", err, strings.TrimSpace(said.String()))
		}
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(resetPatience):
		return fmt.Errorf("reset %s: the kernel has not finished, and the VF has no driver until it does: %w", a, context.DeadlineExceeded)
	}
}

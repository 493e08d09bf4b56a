// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"io"
	"os"
	"strings"
	"syscall"
	"testing"

	types100 "github.com/containernetworking/cni/pkg/types/100"
)

// An ADD is undone once if the process received a signal, or if its result cannot be written. A DEL is never undone.
func TestTakenBack(t *testing.T) {
	undone := 0
	p := Plugin{Name: "x", NoNetns: true, Add: func(*Request) (*types100.Result, error) { return &types100.Result{}, nil },
		Del: func(*Request) error { undone++; return nil }}
	add, conf := newEnv("ADD").with("CNI_NETNS", "/run/netns/x"), config("")
	if o := run(p, add, conf); o.exit != 0 || undone != 0 {
		t.Errorf("without a signal: exit %d, undone %d times: %s", o.exit, undone, o.stdout)
	}
	if exit := p.Run(add.get, strings.NewReader(conf), brokenStream{}, io.Discard); exit != 1 || undone != 1 {
		t.Errorf("without a reader: exit %d, undone %d times", exit, undone)
	}
	end := make(chan os.Signal, 1)
	p.listen = func() <-chan os.Signal { return end }
	end <- syscall.SIGTERM
	if o := run(p, add, conf); o.exit != 1 || undone != 2 || !strings.Contains(o.stdout, `"code": 11`) ||
		!strings.Contains(o.stdout, "terminated arrived during ADD") {
		t.Errorf("with SIGTERM: exit %d, undone %d times: %s", o.exit, undone, o.stdout)
	}
	end <- syscall.SIGTERM
	if o := run(p, newEnv("DEL"), conf); o.exit != 0 || undone != 3 {
		t.Errorf("DEL: exit %d, %d times: %s", o.exit, undone, o.stdout)
	}
	p.DefersSignals = true // the signal from before is still pending
	if o := run(p, add, conf); o.exit != 0 || undone != 3 {
		t.Errorf("DefersSignals and unchanged: exit %d, undone %d times: %s", o.exit, undone, o.stdout)
	}
	p.Add = func(r *Request) (*types100.Result, error) {
		r.DeferSignals()
		r.DeferSignals()
		return &types100.Result{}, nil
	}
	if o := run(p, add, conf); o.exit != 1 || undone != 4 || !strings.Contains(o.stdout, "terminated arrived during ADD") {
		t.Errorf("late: exit %d, undone %d times: %s", o.exit, undone, o.stdout)
	}
}

// TestSignalsWait: no signal with which an admin or systemd ends a program ends a verb.
func TestSignalsWait(t *testing.T) {
	end := listenSignals()
	for _, s := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT} {
		if err := syscall.Kill(os.Getpid(), s); err != nil {
			t.Fatal(err)
		}
		if got := <-end; got != s {
			t.Errorf("got %v, want %v", got, s)
		}
	}
}
